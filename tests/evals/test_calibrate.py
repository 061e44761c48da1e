"""Calibration from a text: what is fitted, its file, who finds it, which jobs are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from evals import calibrate, calibrated, models
from evals.calibrated import CalibrationMissing
from evals.cells import cells
from evals.compose import plan
from evals.data import TEXTS as BUNDLED
from evals.data import DataError
from evals.job import Job, build_job
from evals.settings import flatten

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
    [line] = [line for line in printed.splitlines() if line.startswith("ready: ")]
    return Path(line.partition(": ")[2])


def _job(file: Path | str, *words: str) -> Job:
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
        (["method=adakv", "model=tiny"], "needs no calibration"),
        (["method=vecinfer", "model=tiny", "eval.prefill_tokens=1000000"], "no document has"),
    ):
        assert calibrate.main(words) == 1
        assert reason in capsys.readouterr().err


def _fit(method: str, text: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Path:
    """Calibrate a method on one text, two windows of 64 tokens."""
    own = [f"method={method}", "model=tiny", "eval.prefill_tokens=64", *words]
    assert calibrate.main([*own, "dataset=file", f"dataset.path={text}", "--windows", "2"]) == 0
    [line] = [s for s in capsys.readouterr().out.splitlines() if s.startswith("ready: ")]
    return Path(line.partition(": ")[2])


def _build(method: str, *words: str) -> Job:
    lengths = ["eval.prefill_tokens=128", "eval.scored_tokens=16"]
    [config] = plan([f"cache={method}", "model=tiny", *lengths, *words]).configs
    return build_job(config, Path("unused"))


@pytest.mark.parametrize("method", ["kvquant", "qfilters"])
def test_methods_that_may_be_calibrated_are_by_the_same_command(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file, twice the same to the byte, taken by its path and by auto, never by default."""
    file = _fit(method, TEXTS[-1], capsys)
    first = file.read_bytes()
    file.unlink()
    assert _fit(method, TEXTS[-1], capsys).read_bytes() == first
    with pytest.raises(DataError, match="shares text"):
        _build(method, f"cache.calibration={file}", "dataset=file", f"dataset.path={TEXTS[-1]}")
    with pytest.raises(DataError, match="other weights"):
        _build(method, f"cache.calibration={file}", "model.seed=5")
    named, found = (_build(method, f"cache.calibration={way}") for way in (file, "auto"))
    assert named.key == found.key != _build(method).key
    assert found.calibration[0]["method"] == method
    assert _build(method).calibration == []


def test_kvquants_file_has_the_levels_of_each_layer_and_side(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = mx.load(str(_fit("kvquant", TEXTS[-1], capsys)))
    assert isinstance(held, dict)
    assert set(held) == {f"{i}.{side}.signposts" for i in (0, 1) for side in "kv"}
    for array in held.values():
        levels = np.array(array)
        assert levels.shape == (8,)
        assert (np.diff(levels) > 0).all()
        assert 0 <= levels[0] < levels[-1] <= 1


def test_filters_are_those_of_the_queries_after_rope(capsys: pytest.CaptureFixture[str]) -> None:
    """Layer 0's queries by hand: its eigenvectors of Q^T Q, in fp64."""
    held = mx.load(str(_fit("qfilters", TEXTS[-1], capsys)))
    assert isinstance(held, dict)
    [config] = plan(["cache=fp16", "model=tiny"]).configs
    info = models.describe(config.model, Path("unused"))
    model, tokenizer = models.load({**vars(info)}, "float32")
    tokens, queries = tokenizer.encode(TEXTS[-1].read_text(encoding="utf-8")), []
    layer = model.model.layers[0]
    for start in (0, 64):
        x = model.model.embed_tokens(mx.array(tokens[start : start + 64])[None])
        q = layer.self_attn.q_proj(layer.input_layernorm(x))
        q = q.reshape(1, 64, config.model.heads, -1).transpose(0, 2, 1, 3)
        queries.append(np.array(layer.self_attn.rope(q))[0])
    both = np.concatenate(queries, axis=1).astype(np.float64)
    tops = []
    for one in both:
        u = np.linalg.eigh(one.T @ one)[1][:, -1]
        tops.append(u * np.sign((one @ u).mean()))
    expected = np.stack(tops).reshape(config.model.kv_heads, -1, both.shape[-1]).mean(axis=1)
    assert np.array(held["0.k.filter"]) == pytest.approx(expected, abs=1e-3)
    assert set(held) == {"0.k.filter", "1.k.filter"}


def test_auto_is_the_one_file_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """No file of another method, other options, other weights, or of the job's own text."""
    own = SMALL[:2]
    with pytest.raises(CalibrationMissing, match=r"There: none\nNext step: python scripts/calib"):
        _build("vecinfer", *own)
    _fit("kvquant", TEXTS[-1], capsys)
    _made(TEXTS[-1], capsys, "cache.key_code_bits=4")
    _made(TEXTS[-1], capsys, "model.seed=5")
    other = ["dataset=file", f"dataset.path={TEXTS[-2]}"]
    _made(TEXTS[-2], capsys)
    with pytest.raises(CalibrationMissing, match="0 fit") as refused:
        _build("vecinfer", *own, *other)
    for reason in ("other weights", "shares text", '"base": "kvquant"', '"key_code_bits": 4'):
        assert reason in str(refused.value)
    file = _made(TEXTS[-1], capsys)
    job = _build("vecinfer", *own, *other)
    assert job.key == _build("vecinfer", *own, *other, f"cache.calibration={file}").key
    [said] = job.calibration
    assert said.items() >= {"dataset": "file", "windows": "2", "seed": "0"}.items()
    assert job.config["cache"]["layers"][0]["k"]["base_options"]["calibration"] == (
        f"{said['content']}#0.k"
    )
    assert flatten(job.config)["gear.base_options.calibration"] == said["content"]
    with pytest.raises(CalibrationMissing, match="2 fit") as refused:  # that of TEXTS[-2] as well
        _build("vecinfer", *own)
    assert f"{file}: fits" in str(refused.value)
    assert "calibration=FILE" in str(refused.value)


def test_auto_under_gear_is_the_bases_own_file(capsys: pytest.CaptureFixture[str]) -> None:
    options = "+gear.k.base_options={calibration: auto, key_code_bits: 3, value_code_bits: 2}"
    words = ["gear.k.base=vecinfer", options]
    with pytest.raises(CalibrationMissing, match="method=vecinfer model=tiny"):
        _build("gear", *words)
    file = _made(TEXTS[-1], capsys)
    named = [word.replace("auto", f"'{file}'") for word in words]
    assert _build("gear", *words).key == _build("gear", *named).key


def test_a_file_under_another_name_is_the_same_calibration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = _fit("qfilters", TEXTS[-1], capsys)
    elsewhere = shutil.copy(file, tmp_path / "mine.safetensors")
    key = _build("qfilters", "cache.calibration=auto").key
    assert _build("qfilters", f"cache.calibration={elsewhere}").key == key
    # its budget is no part of what is fitted
    assert _build("qfilters", "cache.calibration=auto", "cache.budget=64").key != key


def test_a_job_without_its_file_is_a_cell_that_says_so_and_its_fp16_arm_is_not() -> None:
    found = cells(["cache=vecinfer,kivi", "model=tiny", "hydra.mode=MULTIRUN"], Path("unused"))
    names = [cell.config.cache["name"] for cell in found]
    assert names == ["fp16", "vecinfer", "kivi"]
    assert [cell.key is None for cell in found] == [False, True, False]
    assert "scripts/calibrate.py method=vecinfer" in (found[1].problem or "")
