"""job.dry_run: every job with its state; nothing computed, nothing written, whatever is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from evals import cli, dry_run
from evals import record as store
from evals.cells import Cell, cells
from evals.job import build_job
from evals.schema import Config

SMALL = ["model=tiny", "dataset.limit=2", "eval.prefill_tokens=128", "eval.scored_tokens=64"]


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    return cli.main()


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give results a temporary root, and neither a session nor models nor data."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a dry run launched jobs")

    monkeypatch.setattr(cli, "_launch", refuse)
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path / "mlruns"))
    monkeypatch.setenv("GEAR_ASSETS", str(tmp_path / "assets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path / "mlruns"


def cell(name: str, record: Any = None, problem: str | None = None) -> Cell:
    key = None if problem else "ab" * 32
    return Cell(name=name, words=[], config=Config(), key=key, record=record, problem=problem)


def test_each_state_is_named_and_a_reason_given_once() -> None:
    failed = store.failure("Killed", "over\nthe limit")
    found = [
        cell("one", {"status": "FINISHED"}),
        cell("two"),
        cell("three", failed),
        cell("four", problem="not\nhere"),
        cell("five", problem="not here"),
    ]
    assert dry_run.listing(found).splitlines() == [
        "done                 abababab  one",
        "to do                abababab  two",
        "failed before [1]    abababab  three",
        "cannot run here [2]  -         four",
        "cannot run here [2]  -         five",
        "",
        "[1] Killed: over the limit",
        "[2] not here",
        "5 jobs: 1 done, 1 to do, 1 failed before, 2 cannot run here. Nothing was computed or"
        " downloaded.",
        "What is on a hub is fetched by the run itself, where there is a network.",
    ]


def test_a_sweep_shows_what_is_done_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    words = [*SMALL, "cache=kivi,gear"]
    fp16, kivi, gear = cells([*words, "hydra.mode=MULTIRUN"], root)
    job = build_job(fp16.config, root)
    body = {"status": "FINISHED", "metrics": {}, "guards": {}, "environment": {}, "started": ""}
    rest = {"key": job.key, "config": job.config, "finished": "", "mlflow_run_id": None}
    store.commit(root, job.key, {**body, **rest})
    before = sorted(root.rglob("*"))
    shown = [line.split(maxsplit=2) for line in _listed(monkeypatch, capsys, *words, "-m")]
    assert shown[0] == ["done", job.key[:8], fp16.name]
    assert [line[:2] for line in shown[1:]] == [["to", "do"]] * 2
    assert [line[2] for line in shown[1:]] == [f"{c.key}"[:8] + f"  {c.name}" for c in (kivi, gear)]
    assert sorted(root.rglob("*")) == before


def _listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> list[str]:
    """Return the lines of the jobs."""
    assert call(monkeypatch, *words, "job.dry_run=true") == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith(dry_run.STATES)]


def test_one_that_cannot_be_built_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _listed(monkeypatch, capsys, *SMALL, "model=tiny,llama3_8b", "cache=kivi", "-m")
    states = [line.split("  ")[0].partition(" [")[0] for line in shown]
    assert states.count("to do") == 2
    assert states.count("cannot run here") >= 1


@pytest.mark.parametrize("words", [["job.dry_run=true,false", "-m"], ["experiment=dry"]])
def test_a_flag_that_is_not_for_the_whole_command_runs_nothing(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    own = tmp_path / "experiment" / "dry.yaml"
    own.parent.mkdir()
    own.write_text("# @package _global_\njob:\n  dry_run: true\n", encoding="utf-8")
    assert call(monkeypatch, "model=tiny", *words, "--config-dir", str(tmp_path)) == 2
    assert "job.dry_run=true: is for a whole command" in capsys.readouterr().err


def test_false_is_no_listing_and_the_last_word_counts() -> None:
    assert not dry_run.asked(["model=tiny", "job.dry_run=false"])
    assert not dry_run.asked(["job.dry_run=true", "job.dry_run=false"])
    assert dry_run.asked(["job.dry_run=false", "job.dry_run=True"])


def test_what_cannot_be_used_is_said_as_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "gear.rnak=8", "job.dry_run=true") == 2
    assert "Did you mean gear.rank?" in capsys.readouterr().err


def test_the_flag_is_not_in_the_key(root: Path) -> None:
    keys = [
        [cell.key for cell in cells([*SMALL, *more], root)]
        for more in ([], [f"{dry_run.FLAG}=true"])
    ]
    assert keys[0] == keys[1]
