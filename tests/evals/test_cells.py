"""Cells: what a command's jobs are called, under which keys they lie, and how each is remade."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals import record as store
from evals.cell_names import places
from evals.cells import Cell, cells, typed, where
from evals.compose import baseline_words
from tests.evals import fake_records
from tests.evals.fake_cells import config

SMALL = ["model=tiny", "dataset.limit=2", "eval.prefill_tokens=128", "eval.scored_tokens=64"]
SWEEP = [*SMALL, "cache=kivi,gear", "gear.rank=2,4", "hydra.mode=MULTIRUN"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_names_show_what_varies_and_each_key_is_there_once(tmp_path: Path) -> None:
    found = cells(SWEEP, tmp_path)
    assert [cell.name for cell in found] == [
        "fp16 · embedded · tiny", "kivi · embedded · tiny",
        "gear (gear.rank=2) · embedded · tiny", "gear (gear.rank=4) · embedded · tiny",
    ]  # fmt: skip
    assert len({cell.key for cell in found}) == 4
    assert not any(cell.record or cell.problem for cell in found)


def test_the_words_of_a_cell_make_it_alone(tmp_path: Path) -> None:
    for cell in cells(SWEEP, tmp_path):
        assert cells(cell.words, tmp_path)[-1] == Cell(
            name=f"{cell.config.cache['name']} · embedded · tiny", words=cell.words,
            config=cell.config, key=cell.key, record=None, problem=None,
        )  # fmt: skip


def test_a_job_of_an_experiments_own_sweep_is_made_by_words(tmp_path: Path) -> None:
    words = ["experiment=smoke", *SMALL]
    found = cells(words, tmp_path)
    assert len(found) == 5
    for cell in found:
        assert [c.key for c in cells(cell.words, tmp_path)][-1] == cell.key


def test_fp16s_words_leave_out_the_other_methods_options() -> None:
    words = ["cache=mlx_quant", "cache.bits=8", "+cache.bits=8", "gear.rank=2"]
    assert baseline_words(words) == ["gear.rank=2", "cache=fp16"]


def test_what_cannot_be_built_here_says_why_and_is_still_told_apart(tmp_path: Path) -> None:
    absent = ["model=local", "model.path=/nowhere,/elsewhere", "cache=kivi"]
    found = cells([*absent, "hydra.mode=MULTIRUN"], tmp_path)
    assert [cell.name for cell in found] == [
        f"{cache} · embedded · local (model.path={path})"
        for path in ("/nowhere", "/elsewhere")
        for cache in ("fp16", "kivi")
    ]
    assert {cell.key for cell in found} == {None}
    assert all("no such folder" in (cell.problem or "") for cell in found)
    assert "\n" not in "".join(cell.problem or "" for cell in found)


def test_a_record_is_found_by_its_key(tmp_path: Path) -> None:
    [cell] = cells([*SMALL, "cache=fp16"], tmp_path)
    other = fake_records.finished("fp16")
    store.commit(tmp_path, other["key"], other)
    assert cell.key is not None
    assert cells(cell.words, tmp_path)[0].record is None
    [again] = cells([*SMALL, "cache=fp16", "eval.tile_tokens=64"], tmp_path)
    assert again.key == cell.key  # how packed attention runs is nothing to fp16


def test_a_setting_that_only_datasets_differ_in_makes_no_rows() -> None:
    jobs = [config("kivi", "tiny", data) for data in ("gsm8k_cot", "aqua_cot")]
    jobs[1].eval.max_new_tokens = 32
    assert [place.row for place in where(jobs)] == ["kivi", "kivi"]


def test_two_protocols_of_a_dataset_are_columns() -> None:
    jobs = [config("kivi", "tiny", "embedded") for _ in range(2)]
    jobs[1].eval.name = jobs[1].eval.protocol = "prefix"
    assert [place.name for place in where(jobs)] == [
        "kivi · embedded · decode · tiny", "kivi · embedded · prefix · tiny",
    ]  # fmt: skip


def test_equal_configs_have_different_names() -> None:
    same = [fake_records.config("kivi")] * 2
    assert [place.row for place in places(same)] == ["kivi", "kivi #2"]


def test_a_command_is_read_as_run_py_reads_it(tmp_path: Path) -> None:
    assert typed(["cache=kivi,gear", "-m"]) == ["cache=kivi,gear", "hydra.mode=MULTIRUN"]
    assert typed(["--config-dir", str(tmp_path)]) == [f'hydra.searchpath=["file://{tmp_path}"]']
    with pytest.raises(ValueError, match="there is no such folder"):
        typed(["--config-dir", "/nowhere"])
