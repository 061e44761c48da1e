"""Model folders of a stranger: nothing in them runs, and what lies is refused before it is loaded.

Code that ships with them would make the canary file.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from evals import gguf_convert, models
from evals.model_folder import ModelError, read_header
from evals.schema import ModelConfig
from tests.evals import model_files

pytestmark = pytest.mark.fault

Q4_K = 12


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete model folder."""
    folder = tmp_path_factory.mktemp("sound")
    model_files.write_gguf(folder / "m.gguf", model_files.small_llama())
    (folder / "model").mkdir()
    gguf_convert.convert(folder / "m.gguf", folder / "model")
    return folder / "model"


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def folder(sound: Path, canary: Path, tmp_path: Path) -> Path:
    """A copy of it with a module that makes the canary."""
    copy = Path(shutil.copytree(sound, tmp_path / "model"))
    code = f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\nModel = ModelArgs = Evil\n"
    (copy / "evil.py").write_text(code, encoding="utf-8")
    return copy


def describe(folder: Path) -> models.ModelInfo:
    config = ModelConfig(name="local", source="local", path=str(folder))
    return models.describe(config, folder.parent / "runs")


def load(folder: Path) -> Any:
    """Load a folder as the worker does, though the parent would have refused it."""
    info = {"config": {"source": "local"}, "path": str(folder), "weight_dtype": "float32"}
    return models.load(info, "float32")


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}), encoding="utf-8")


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        describe(folder)
    assert "Next: " in str(error.value)
    return str(error.value)


CODE = {
    "model_file": {"model_file": "evil.py"},
    "auto_map": {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}},
    "tokenizer_auto_map": {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}},
}


@pytest.mark.parametrize("name", CODE)
def test_a_model_that_brings_code(folder: Path, canary: Path, name: str) -> None:
    file = "tokenizer_config.json" if "tokenizer" in name else "config.json"
    change(folder / file, **CODE[name], trust_remote_code=True)
    assert "asks to run the model's own code" in refused(folder)
    if name == "model_file":  # the worker trusts nobody either
        with pytest.raises(ModelError, match="mlx_lm cannot load it"):
            load(folder)
    assert not canary.exists()


def test_a_claim_to_be_trusted_and_a_pickle_beside_the_weights_change_nothing(
    folder: Path, canary: Path
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return os.mkdir, (str(canary),)

    for name in ("pytorch_model.bin", "tokenizer.pkl", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Evil()))
    for name in ("config.json", "tokenizer_config.json"):
        change(folder / name, trust_remote_code=True)
    assert describe(folder).n_layers == model_files.LAYERS
    load(folder)
    assert not canary.exists()
    (folder / "model.safetensors").unlink()
    assert "only model.pt, pytorch_model.bin; expected model*.safetensors" in refused(folder)


def test_a_chat_template_cannot_leave_its_sandbox(folder: Path, canary: Path) -> None:
    from jinja2.exceptions import SecurityError

    template = f"{{{{ cycler.__init__.__globals__.os.mkdir('{canary}') }}}}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _, tokenizer = load(folder)
    with pytest.raises(SecurityError):
        tokenizer.wrapped.apply_chat_template([{"role": "user", "content": "x"}])
    assert not canary.exists()


@pytest.mark.parametrize("field", ["tool_parser_type", "chat_template_type"])
def test_a_tokenizer_that_names_a_module_elsewhere(
    folder: Path, canary: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    change(folder / "tokenizer_config.json", **{field: "../../evil"})
    with pytest.raises(ModelError, match="mlx_lm cannot load it"):
        load(folder)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("named", "answer"),
    [
        ("../../x.safetensors", "../../x.safetensors named in"),
        ("/etc/passwd", "/etc/passwd named in"),
        (["model.safetensors"], "named in"),
        ({"a": 1}, "named in"),
        (None, "None named in"),
    ],
)
def test_an_index_that_names_files_elsewhere(folder: Path, named: Any, answer: str) -> None:
    index = {"weight_map": {"a": named}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert answer in refused(folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "model-2.safetensors", "sub/x.json"])
def test_a_link_that_leads_out_of_the_folder(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "private").write_text("mine", encoding="utf-8")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to("../private" if "/" not in name else "../../private")
    assert f"{name}: a link that leads out of the model's folder" in refused(folder)


def test_links_of_the_hub_cache_and_inside_the_folder_are_read(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    describe(folder)
    snapshot = tmp_path / "models--owner--name/snapshots/abc"
    (snapshot.parent.parent / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        blob = snapshot.parent.parent / "blobs" / path.name
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    describe(snapshot)


def test_a_config_that_is_no_ordinary_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "no ordinary file" in refused(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_config_of_many_levels(folder: Path, name: str) -> None:
    (folder / name).write_text('{"a":' * 100_000, encoding="utf-8")
    assert f"{name}: not readable" in refused(folder)


def tensor(dtype: str, shape: list[Any], *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


HEADERS = {
    "out_of_range": ({"a": tensor("F32", [4], 0, 16)}, "truncated"),
    "overlapping": ({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [1], 4, 8)}, "belies"),
    "gap": ({"a": tensor("F32", [1], 4, 8)}, "belies"),
    "huge": ({"a": tensor("F32", [2**40, 2**40], 0, 8)}, "no array of MLX"),
    "huge_and_empty": ({"a": tensor("F32", [0, 2**40], 0, 0)}, "no array of MLX"),
    "negative": ({"a": tensor("F32", [-1, -2], 0, 8)}, "whole number"),
    "fraction": ({"a": tensor("F32", [2.0], 0, 8)}, "whole number"),
    "fraction_of_a_byte": ({"a": tensor("F32", [2], 0.0, 8.0)}, "whole number"),
    "truth": ({"a": tensor("F32", [True, 2], 0, 8)}, "whole number"),
    "unknown": ({"a": tensor("X9", [2], 0, 8)}, "no array of MLX"),
    "text": ({"a": tensor("F32", "22", 0, 8)}, "whole number"),
    "twice": ('{"a": {}, "a": {}}', "stands twice"),
    "levels": ('{"a":' + "[" * 200_000, "RecursionError"),
    "list": ("[]", "unreadable header"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies(tmp_path: Path, name: str) -> None:
    header, answer = HEADERS[name]
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"12345678")
    with pytest.raises(ModelError, match=answer):
        read_header(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 10**9), ("hidden_size", 10**12), ("vocab_size", 10**12)],
)
def test_a_config_that_asks_for_more_than_the_weights_hold(
    folder: Path, field: str, value: int
) -> None:
    change(folder / "config.json", **{field: value})
    assert f"{field}={value}; the weights have" in refused(folder)


@pytest.mark.parametrize("field", ["num_key_value_heads", "intermediate_size", "vocab_size"])
def test_a_shape_that_clashes_with_the_weights_fails_the_job(folder: Path, field: str) -> None:
    change(folder / "config.json", **{field: 1})
    with pytest.raises(ModelError, match=r"mlx_lm cannot load it .*shape.*fit config\.json"):
        load(folder)


def write_q4_k(path: Path) -> None:
    """Write a GGUF file of one tensor of 256 values in Q4_K, by the format's specification."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += text("token_embd.weight") + struct.pack("<IQQIQ", 2, 256, 1, Q4_K, 0)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + bytes(144))


def test_a_gguf_type_that_loads_wrongly(tmp_path: Path) -> None:
    import mlx.core as mx

    write_q4_k(tmp_path / "model.gguf")
    loaded: Any = mx.load(str(tmp_path / "model.gguf"))
    with pytest.raises(ValueError, match=r"'token_embd' is .*float16: expected Q4_1, Q8_0 or F32"):
        gguf_convert._dense(loaded, "token_embd")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    change(tmp_path / "config.json", num_attention_heads=1, hidden_size=64, num_hidden_layers=1)
    assert "only model.gguf; expected model*.safetensors" in refused(tmp_path)
