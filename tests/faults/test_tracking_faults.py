"""A tracking database that is locked, read-only, deleted or garbage, and many sweeps at once.

The record is safe each time, the error says what to do, and sync later shows it exactly once.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from evals import record as store
from evals import sweeps, tracking_store
from evals.schema import TrackingConfig
from evals.tracking import log_sweep, sync
from evals.tracking_store import TrackingError
from tests.evals.fake_records import commit, finished, on_disk
from tests.faults import forked

pytestmark = pytest.mark.fault

MLFLOW = TrackingConfig(name="mlflow")
Record = dict[str, Any]


def runs_of(root: Path) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_store.store_uri(root, MLFLOW))
    return client.search_runs([e.experiment_id for e in client.search_experiments()])


@pytest.fixture
def root(database: Path, tmp_path: Path) -> Path:
    """A results root with that database and nothing else."""
    shutil.copy(database, tmp_path / "mlflow.db")
    return tmp_path


def lock(path: Path) -> Callable[[], None]:
    """Hold the database as another program does; returns what lets it go."""
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    return holder.close


def make_read_only(path: Path) -> Callable[[], None]:
    """Mark the file as of a newer format: SQLite may not write it then, whoever asks."""
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:18] + b"\x09" + content[19:])
    return lambda: [path.write_bytes(content), None][1]


def replace_by_garbage(path: Path) -> Callable[[], None]:
    """Put something in its place that is no database; following the error's advice repairs it."""
    path.write_bytes(b"<html>not here</html>" * 100)

    def move_away() -> None:
        path.rename(f"{path}.bad")

    return move_away


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lock, r"database is locked.*End the program that holds it"),
        (make_read_only, r"readonly database.*Make the file and its folder writable"),
        (replace_by_garbage, r"not a database.*move it away \(mv "),
    ],
)
def test_a_database_that_cannot_be_written(
    root: Path,
    spoil: Callable[[Path], Callable[[], None]],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking_store, "BUSY_S", 0.2)
    (record,) = commit(root, [finished()])
    repair = spoil(root / "mlflow.db")
    for attempt in (
        lambda: log_sweep(root, [record], [], MLFLOW),
        lambda: sync(root, MLFLOW),
    ):
        with pytest.raises(TrackingError, match=f"{root}/mlflow.db: .*{problem}.*records are safe"):
            attempt()
    assert on_disk(root, record) == record
    repair()
    _is_filled_in_exactly_once(root, record)


def _is_filled_in_exactly_once(root: Path, record: Record) -> None:
    """Sync twice: one parent, one child, and the record knows the child."""
    for _ in range(2):
        (view,) = sync(root, MLFLOW)
        runs = [r for r in runs_of(root) if r.data.tags["gear.jobset"] == _jobset(root)]
        assert sorted(run.info.run_id for run in runs) == sorted(
            [view.parent_run_id, view.run_ids[record["key"]]]
        )
        found = on_disk(root, record)
        assert found["mlflow_run_id"] == view.run_ids[record["key"]]
        assert store.equal(found, record)


def _jobset(root: Path) -> str:
    (sweep,) = sweeps.sweeps(root)
    return sweep.jobset


def test_a_deleted_database_is_made_anew(root: Path) -> None:
    (record,) = commit(root, [finished()])
    (root / "mlflow.db").unlink()
    log_sweep(root, [record], [], MLFLOW)
    _is_filled_in_exactly_once(root, record)
    assert not [path for path in root.iterdir() if path.name.startswith(".mlflow.db")]


def test_an_empty_file_is_no_database_yet(root: Path) -> None:
    (record,) = commit(root, [finished()])
    (root / "mlflow.db").write_bytes(b"")
    log_sweep(root, [record], [], MLFLOW)
    _is_filled_in_exactly_once(root, record)


def test_a_database_deleted_after_logging_is_filled_again(root: Path) -> None:
    (record,) = commit(root, [finished()])
    view = log_sweep(root, [record], [], MLFLOW)
    (root / "mlflow.db").unlink()
    (again,) = sync(root, MLFLOW)
    assert len(runs_of(root)) == 2
    assert again.run_ids[record["key"]] != view.run_ids[record["key"]]
    # Filled in once: the record itself does not follow the store.
    assert on_disk(root, record)["mlflow_run_id"] == view.run_ids[record["key"]]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(root: Path) -> None:
    (record,) = commit(root, [finished()])
    root.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(TrackingError, match="records are safe"):
            log_sweep(root, [record], [], MLFLOW)
    finally:
        root.chmod(stat.S_IRWXU)
    assert on_disk(root, record) == record


def test_a_database_that_breaks_while_it_is_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    def fail(*_: Any, **__: Any) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    (record,) = commit(root, [finished()])
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_terminated", fail)
        with pytest.raises(TrackingError, match=r"malformed.*records are safe"):
            log_sweep(root, [record], [], MLFLOW)
    assert on_disk(root, record) == record
    _is_filled_in_exactly_once(root, record)


def test_half_a_sweep_file_costs_the_sweep_not_the_records(root: Path) -> None:
    (record,) = commit(root, [finished()])
    log_sweep(root, [record], [], MLFLOW)
    (path,) = (root / "sweeps").glob("*.json")
    path.write_text(path.read_text(encoding="utf-8")[:30], encoding="utf-8")
    (view,) = sync(root, MLFLOW)
    assert list(view.run_ids) == [record["key"]]


def _log_one(root: Path, seed: int, barrier: Barrier) -> None:
    """Log the shared record and one of our own, at the same moment as the other processes."""
    shared, own = finished("fp16"), finished(seed=seed)
    store.commit(root, own["key"], own)
    barrier.wait(120)
    log_sweep(root, [shared, own], [f"seed={seed}"], MLFLOW)
    log_sweep(root, [shared], [], MLFLOW)


def test_eight_processes_on_a_fresh_database(tmp_path: Path) -> None:
    (shared,) = commit(tmp_path, [finished("fp16")])
    context = forked.context()
    barrier = context.Barrier(8)
    workers = [
        context.Process(target=_log_one, args=(tmp_path, seed, barrier)) for seed in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
    assert [worker.exitcode for worker in workers] == [0] * 8
    runs = runs_of(tmp_path)
    kinds = [run.data.tags["gear.kind"] for run in runs]
    assert (kinds.count("sweep"), kinds.count("job")) == (9, 17)
    assert all(run.info.status == "FINISHED" for run in runs)
    views = {run.info.run_id for run in runs if run.data.tags.get("gear.key") == shared["key"]}
    assert on_disk(tmp_path, shared)["mlflow_run_id"] in views
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
