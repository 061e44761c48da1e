"""What a run shows of its records, before any store: description and diff."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from evals import tracking_runs
from evals.sweeps import Sweep
from tests.evals.fake_records import commit, finished


def test_a_long_table_is_cut_to_whole_lines_in_the_description() -> None:
    records = [finished("kivi", 0.25, seed=seed) for seed in range(100)]
    text = tracking_runs.note("run.py", records)
    assert len(text) <= 8000
    assert text.endswith("|\n\n(cut: see table.md)\n")


def test_the_diff_of_a_dirty_checkout_stays_with_the_record(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(  # noqa: S603
            command, cwd=tmp_path / "checkout", check=True, capture_output=True, text=True
        ).stdout.strip()

    (tmp_path / "checkout").mkdir()
    git("init", "-q")
    for text in ("old\n", "new\n"):
        (tmp_path / "checkout" / "file").write_text(text, encoding="utf-8")
        if text == "old\n":
            git("add", "file")
            git("commit", "-q", "-m", "first")
    state = {"commit": git("rev-parse", "HEAD"), "dirty": True}
    record = {**finished(), "environment": {"git": state}}
    clean = {**finished("kivi", 0.25), "environment": {"git": {**state, "dirty": False}}}
    commit(tmp_path, [record, clean])
    tracking_runs.keep_diffs(tmp_path, [record, clean], tmp_path / "checkout")
    git("checkout", "file")
    tracking_runs.keep_diffs(tmp_path, [record, clean], tmp_path / "checkout")
    for made, has_diff in ((record, True), (clean, False)):
        run = tracking_runs.job_run(
            Sweep([made["key"]], [], [], "gear"), made, "name", tmp_path, "parent"
        )
        (tmp_path / "out").mkdir()
        run.write(tmp_path / "out")
        assert (tmp_path / "out" / "git.diff").exists() == has_diff
        assert run.tags["mlflow.source.git.commit"] == state["commit"]
        if has_diff:
            assert "+new" in (tmp_path / "out" / "git.diff").read_text(encoding="utf-8")
        shutil.rmtree(tmp_path / "out")
