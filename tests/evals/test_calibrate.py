"""Calibration from a text: what is fitted, its file and metadata, and the jobs that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from evals import calibrate, calibrated, models
from evals.compose import plan
from evals.data import TEXTS as BUNDLED
from evals.data import DataError
from evals.job import build_job

TEXTS = sorted(BUNDLED.glob("*.txt"))
SMALL = ["cache.key_code_bits=3", "cache.value_code_bits=2", "model=tiny", "eval.prefill_tokens=64"]


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEAR_ASSETS", str(tmp_path / "assets"))
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path / "runs"))


def _made(text: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Path:
    """Calibrate on one text and return the file that the command names."""
    own = ["method=vecinfer", "dataset=file", f"dataset.path={text}", *SMALL, *words]
    assert calibrate.main([*own, "--windows", "2"]) == 0
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.startswith("use it")]
    return Path(line.partition("cache.calibration=")[2])


def _job(file: Path, *words: str) -> object:
    small = [word for word in SMALL if not word.startswith("eval")]
    lengths = ["eval.prefill_tokens=128", "eval.scored_tokens=16"]
    [config] = plan(
        ["cache=vecinfer", f"cache.calibration={file}", *small, *lengths, *words]
    ).configs
    return build_job(config, Path("unused"))


def test_a_file_has_every_layer_and_says_what_it_is_made_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = _made(TEXTS[-1], capsys)
    assert file.parent == tmp_path / "assets/calibration"
    held, made = mx.load(str(file), return_metadata=True)
    layers = {name.rpartition(".")[0] for name in held}
    assert layers == {f"{i}.{side}" for i in range(len(layers) // 2) for side in "kv"}
    assert held["0.k.codebook"].shape == (8, 4)
    assert held["0.v.codebook"].shape == (4, 8)
    assert made == calibrated.metadata(file)
    assert (made["method"], made["windows"], made["window_tokens"]) == ("vecinfer", "2", "64")
    assert len(json.loads(made["texts"])) == 1


def test_the_same_call_finds_its_file_and_another_text_makes_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = _made(TEXTS[-1], capsys)
    stamp = file.stat().st_mtime_ns
    assert _made(TEXTS[-1], capsys) == file
    assert file.stat().st_mtime_ns == stamp
    assert _made(TEXTS[-2], capsys) != file
    assert _made(TEXTS[-1], capsys, "seed=1") != file


def test_it_is_fitted_on_the_keys_that_the_cache_gets(capsys: pytest.CaptureFixture[str]) -> None:
    """λ² is the largest key of each channel over the windows, from the model run by hand."""
    file = _made(TEXTS[-1], capsys)
    [config] = plan(["cache=fp16", *SMALL[2:]]).configs
    info = models.describe(config.model, Path("unused"))
    model, tokenizer = models.load({**vars(info)}, "float32")
    tokens, largest = tokenizer.encode(TEXTS[-1].read_text(encoding="utf-8")), []
    for start in (0, 64):
        cache = make_prompt_cache(model)
        model(mx.array(tokens[start : start + 64])[None], cache=cache)
        largest.append(np.abs(np.array(cache[1].keys[:, :, :64])).max(axis=(0, 2)))
    found = np.array(mx.load(str(file))["1.k.smooth"])
    assert found == pytest.approx(np.sqrt(np.maximum(*largest)), rel=1e-3)


def test_a_job_on_the_same_text_is_refused_and_on_another_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = _made(TEXTS[-1], capsys)
    same = ["dataset=file", f"dataset.path={TEXTS[-1]}"]
    with pytest.raises(DataError, match="shares text"):
        _job(file, *same)
    with pytest.raises(DataError, match="shares text"):  # the file's one text is among fourteen
        _job(file, "dataset=embedded", "dataset.limit=null")
    _job(file, "dataset=embedded", "dataset.limit=1")
    _job(file, "dataset=file", f"dataset.path={TEXTS[-2]}")


def test_a_job_under_gear_is_refused_too(capsys: pytest.CaptureFixture[str]) -> None:
    file = _made(TEXTS[-1], capsys)
    options = f"+gear.k.base_options={{calibration: '{file}', key_code_bits: 3}}"
    words = ["cache=gear", "model=tiny", "gear.k.base=vecinfer", options, "dataset=file"]
    [config] = plan([*words, f"dataset.path={TEXTS[-1]}"]).configs
    with pytest.raises(DataError, match="shares text"):
        build_job(config, Path("unused"))


def test_a_file_of_another_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    file = _made(TEXTS[-1], capsys)
    with pytest.raises(DataError, match="other weights"):
        _job(file, "model.seed=5", "dataset=embedded", "dataset.limit=1")


def test_what_cannot_be_calibrated_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in (
        (["model=tiny"], "name one"),
        (["method=kivi", "model=tiny"], "needs no calibration"),
        (["method=kvquant", "model=tiny"], "nothing here fits one"),
        (["method=vecinfer", "model=tiny", "eval.prefill_tokens=1000000"], "no document has"),
    ):
        assert calibrate.main(words) == 1
        assert reason in capsys.readouterr().err
