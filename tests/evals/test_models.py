"""evals.models: describe without MLX, load without a network, every error with a next step."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from huggingface_hub import constants
from mlx.utils import tree_flatten
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from evals import gguf_convert, hub, models
from evals.models import ModelError, ModelInfo, compute_dtype, describe, load
from evals.schema import ModelConfig
from tests.evals import model_files

ROOT = Path(__file__).resolve().parents[2]
TINY = ModelConfig(name="tiny", source="tiny", head_dim=16)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A complete model folder in float32."""
    folder = tmp_path_factory.mktemp("converted")
    model_files.write_gguf(folder / "m.gguf", model_files.small_llama())
    (folder / "model").mkdir()
    gguf_convert.convert(folder / "m.gguf", folder / "model")
    return folder / "model"


@pytest.fixture
def folder(converted, tmp_path):
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(converted, tmp_path / "model"))


def local(folder: Path) -> ModelConfig:
    return ModelConfig(name="local", source="local", path=str(folder))


def test_tiny_is_described_by_its_sizes(tmp_path):
    info = describe(TINY, tmp_path)
    assert (info.name, info.path, info.weight_dtype) == ("tiny", None, "float32")
    assert (info.n_layers, info.kv_heads, info.head_dim_k, info.head_dim_v) == (2, 2, 16, 16)
    assert info.config["source"] == "tiny"
    assert info.config["head_dim"] == 16
    assert describe(replace(TINY, seed=1), tmp_path).weight_hash != info.weight_hash


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("heads", 3),
        ("kv_heads", 0),
        ("head_dim", 15),
        ("head_dim", -2),
        ("vocab_size", 256),
        ("seed", -1),
        ("dtype", "int8"),
    ],
)
def test_a_tiny_model_that_cannot_be_is_refused(tmp_path, field, value):
    named = "kv_heads" if (field, value) == ("heads", 3) else field
    with pytest.raises(ModelError, match=rf"model\.{named}=.*must be"):
        describe(replace(TINY, **{field: value}), tmp_path)


def test_a_folder_is_described_without_its_path(folder, tmp_path):
    info = describe(local(folder), tmp_path / "results")
    assert info.path == folder
    assert (info.n_layers, info.kv_heads, info.head_dim_k) == (2, 2, 16)
    assert info.config == {"source": "local"}
    moved = folder.rename(tmp_path / "elsewhere")
    assert describe(local(moved), tmp_path / "results").weight_hash == info.weight_hash


@pytest.mark.fault
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_whatever_changes_a_result_changes_the_hash(folder, tmp_path, name):
    before = describe(local(folder), tmp_path).weight_hash
    content = (folder / name).read_bytes()
    # a space is harmless JSON; in the weights the last byte of the last tensor changes
    changed = content[:-1] + bytes([content[-1] ^ 1]) if "model." in name else content + b" "
    (folder / name).write_bytes(changed)
    assert describe(local(folder), tmp_path).weight_hash != before
    (folder / name).write_bytes(content)
    (folder / "README.md").write_text("notes")
    assert describe(local(folder), tmp_path).weight_hash == before


def test_describing_imports_no_mlx(folder, tmp_path):
    code = f"""
import sys
from pathlib import Path
from evals.models import describe
from evals.schema import ModelConfig
info = describe(ModelConfig(name="local", source="local", path={str(folder)!r}), Path("."))
assert info.n_layers == 2
describe(ModelConfig(name="tiny", source="tiny"), Path("."))
heavy = {{"mlx", "mlx_lm", "mlflow", "transformers", "hydra", "numpy"}}
loaded = {{name.partition(".")[0] for name in sys.modules}} & heavy
assert not loaded, loaded
"""
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_loading_opens_no_connection(folder, tmp_path):
    info = {**asdict(describe(local(folder), tmp_path)), "path": str(folder)}
    code = f"""
import socket
def refuse(*args, **kwargs):
    raise AssertionError("a network call")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from evals.models import load
model, tokenizer = load({info!r}, "float32")
assert tokenizer.encode("he") == [{model_files.vocabulary().index("he")}]
"""
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_folder_loads_as_the_model_it_is(folder, tmp_path):
    model, tokenizer = load(asdict(describe(local(folder), tmp_path)), "float32")
    tokens = mx.array([tokenizer.encode("hello world")])
    assert mx.allclose(model(tokens), model_files.small_llama()(tokens), atol=1e-5)


def test_special_tokens_are_never_added_and_long_texts_are_no_warning(folder, tmp_path):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 4}))
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = model_files.SPECIAL[1]
    inner.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 1)])
    inner.save(str(folder / "tokenizer.json"))
    _, tokenizer = load(asdict(describe(local(folder), tmp_path)), "float32")
    tokens = tokenizer.encode("abc" * 100)
    assert len(tokens) == 300
    assert not {0, 1, 2} & set(tokens)


def float_types(model: nn.Module) -> set[mx.Dtype]:
    kinds = {value.dtype for _, value in tree_flatten(model.parameters())}
    return {kind for kind in kinds if mx.issubdtype(kind, mx.floating)}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_floating_weights_get_the_dtype(folder, tmp_path, dtype):
    for config in (TINY, local(folder)):
        model, _ = load(asdict(describe(config, tmp_path)), dtype)
        assert float_types(model) == {getattr(mx, dtype)}


def test_quantised_weights_stay_packed_and_their_scales_are_cast(folder, tmp_path):
    model = model_files.small_llama()
    nn.quantize(model, group_size=32, bits=4)
    model.set_dtype(mx.float16)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    info = describe(local(folder), tmp_path)
    assert info.weight_dtype == "float16"
    loaded, _ = load(asdict(info), "float32")
    weights = dict(tree_flatten(loaded.parameters()))
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == mx.uint32
    assert float_types(loaded) == {mx.float32}
    tokens = mx.array([[5, 9, 200]])
    model.set_dtype(mx.float32)
    assert mx.allclose(loaded(tokens), model(tokens), atol=1e-4)


def test_auto_is_float32_on_the_cpu_and_the_weights_elsewhere(tmp_path):
    info: ModelInfo = replace(describe(TINY, tmp_path), weight_dtype="bfloat16")
    assert compute_dtype(TINY, info, "cpu") == "float32"
    assert compute_dtype(TINY, info, "metal") == "bfloat16"
    assert compute_dtype(replace(TINY, dtype="float16"), info, "cpu") == "float16"


def test_a_hub_model_records_its_commit(folder, tmp_path, monkeypatch):
    commit = "f" * 40
    snapshot = tmp_path / "models--owner--model" / "snapshots" / commit
    shutil.copytree(folder, snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.snapshot.cache_clear()
    config = ModelConfig(name="hub", source="hub", repo="owner/model", revision=commit)
    info = describe(config, tmp_path)
    assert info.name == "owner/model"
    assert info.config == {"source": "hub", "repo": "owner/model", "revision": commit}
    assert describe(replace(config, name="preset"), tmp_path).name == "preset"
    hub.snapshot.cache_clear()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ModelConfig(name="x", source="hub"), "model.repo is not set"),
        (ModelConfig(name="x", source="local"), "model.path is not set"),
        (ModelConfig(name="x", source="local", path="/no/such/folder"), "/no/such/folder: no such"),
        (ModelConfig(name="x", source="smolm2"), "did you mean smollm2"),
    ],
)
def test_an_incomplete_choice_says_what_is_missing(tmp_path, config, said):
    with pytest.raises(ModelError, match=said):
        describe(config, tmp_path)


def test_the_default_model_that_was_not_fetched_says_how(tmp_path, monkeypatch):
    monkeypatch.setenv("GEAR_ASSETS", str(tmp_path / "none"))
    with pytest.raises(ModelError, match=r"python -m evals\.assets.*model=tiny"):
        describe(ModelConfig(name="smollm2", source="smollm2"), tmp_path)


@pytest.mark.parametrize(
    "change", [{"model_type": "no_such_model"}, {"hidden_size": 128}, {"num_hidden_layers": 3}]
)
def test_what_mlx_lm_cannot_build_is_a_clear_error(folder, tmp_path, change):
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    info = asdict(describe(local(folder), tmp_path))
    with pytest.raises(ModelError, match=r"mlx_lm cannot load it .*Next: "):
        load(info, "float32")


@pytest.mark.fault
def test_code_beside_the_weights_never_runs(folder, tmp_path):
    marker = tmp_path / "ran"
    (folder / "modeling.py").write_text(f"open({str(marker)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "modeling.py"}))
    with pytest.raises(ModelError, match="model_file"):
        describe(local(folder), tmp_path)
    with pytest.raises(ModelError, match=r"mlx_lm cannot load it .*modeling\.py"):
        models._load_folder(folder)
    assert not marker.exists()
