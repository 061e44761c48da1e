"""A home that cannot be written, no git, another folder to stand in, a checkout that was moved.

Each through run.py itself, in a copy of the checkout, with the tiny model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evals import record as store

pytestmark = pytest.mark.fault
ROOT = Path(__file__).parents[2]
JOB = [
    "model=tiny", "cache=kivi", "dataset.limit=2", "eval.prefill_tokens=128",
    "eval.scored_tokens=64", "eval.bootstrap_samples=50",
]  # fmt: skip


def call(checkout: Path, script: str, *words: str, cwd: Path, **environment: str) -> str:
    """Run a script of a checkout and return what it prints on stdout."""
    given = {k: v for k, v in os.environ.items() if not k.startswith("GEAR_")}
    given |= {"PYTHONPATH": str(checkout), **environment}
    done = subprocess.run(  # noqa: S603
        [sys.executable, str(checkout / script), *words],
        capture_output=True, text=True, check=False, cwd=cwd, env=given, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, without git."""
    copy = tmp_path_factory.mktemp("checkouts") / "one"
    for name in ("evals", "gear", "conf", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run.py", copy)
    return copy


def test_read_only_home_no_git_and_another_folder(
    checkout: Path, database: Path, tmp_path: Path
) -> None:
    """A home that is a file can be written by nobody, root included."""
    (checkout / "mlruns").mkdir(exist_ok=True)
    shutil.copy(database, checkout / "mlruns/mlflow.db")
    home, empty = tmp_path / "home", tmp_path / "empty"
    home.write_text("")
    empty.mkdir()
    shown = call(
        checkout, "run.py", *JOB, cwd=empty, HOME=str(home), PATH=str(empty),
        XDG_CACHE_HOME=str(home / "cache"), XDG_CONFIG_HOME=str(home / "config"),
    )  # fmt: skip
    assert "kivi" in shown
    assert not list(empty.iterdir())
    records = list(store.records(checkout / "mlruns"))
    assert [(r["status"], r["environment"]["git"]) for r in records] == [("FINISHED", None)] * 2
    assert all(record["mlflow_run_id"] for record in records)


def test_a_moved_checkout_shows_the_same_tables(checkout: Path, tmp_path: Path) -> None:
    call(checkout, "run.py", *JOB, "tracking=none", cwd=checkout)
    before = list(store.records(checkout / "mlruns"))
    table = [*JOB, "format=md"]
    shown = call(checkout, "scripts/tables.py", *table, cwd=tmp_path)
    moved = tmp_path / "moved"
    shutil.move(checkout, moved)
    try:
        assert call(moved, "scripts/tables.py", *table, cwd=tmp_path) == shown
        call(moved, "run.py", *JOB, "tracking=none", cwd=tmp_path)
        assert list(store.records(moved / "mlruns")) == before
        assert call(moved, "scripts/tables.py", *table, cwd=tmp_path) == shown
    finally:
        shutil.move(moved, checkout)
    assert "kivi" in shown
    assert str(checkout) not in shown
