"""A process that dies, or a disk that fills up, at each step in which results are written.

The steps are counted first (tests/faults/steps.py), then each of them goes wrong once: in a sweep's
own process, in its worker with the real evaluation, and while records are logged in MLflow. After a
clean run of the same command the records are those of an uninterrupted one, and what was finished
was not computed again.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from evals import record as store
from evals.record import FINISHED
from tests.evals.fake_records import commit, finished, on_disk
from tests.faults import forked
from tests.faults.steps import FULL, KILL, SPACE

pytestmark = pytest.mark.fault
HERE = Path(__file__).parent
SWEEP = ["one"]
OWN = ("gear.parent", "mlflow.parentRunId")
"""Tags that hold a run's id, which is another in each store."""

FAULTS = pytest.mark.parametrize("fault", [KILL, FULL])


def steps_of(place: Path) -> list[str]:
    return json.loads((place / "steps.json").read_text())


def computed(root: Path) -> list[str]:
    path = root / "computed.txt"
    return path.read_text().split() if path.exists() else []


def contents(root: Path) -> dict[str, bytes]:
    """Return the finished records as they are on disk."""
    done = [record["key"] for record in store.records(root) if record["status"] == FINISHED]
    return {key: (store.record_dir(root, key) / store.RECORD).read_bytes() for key in done}


def same(root: Path, whole: Path) -> bool:
    records, expected = list(store.records(root)), list(store.records(whole))
    return len(records) == len(expected) and all(
        store.equal(a, b) for a, b in zip(records, expected, strict=True)
    )


def check_outcome(code: int | None, place: Path, fault: str, complete: bool) -> None:
    """Killed is killed; a full disk is said in a sentence, unless nothing more had to fit."""
    if fault == KILL:
        assert code == -9
        return
    said = (place / "out.txt").read_text()
    assert code == 0 if complete else code == 1
    assert "Traceback" not in said
    assert complete or (SPACE in said or "disk is full" in said)
    assert complete or "ree space" in said


@FAULTS
def test_a_sweep_at_each_step(tmp_path: Path, fault: str, record_property: Any) -> None:
    whole = tmp_path / "whole/root"
    whole.mkdir(parents=True)
    assert forked.run(forked.sweep, whole, SWEEP, False) == 0
    names, kept = steps_of(whole.parent), []
    for at in range(1, len(names) + 1):
        root = tmp_path / f"{at}/root"
        root.mkdir(parents=True)
        code = forked.run(forked.sweep, root, SWEEP, False, at, fault)
        before, begun = contents(root), computed(root)
        check_outcome(code, root.parent, fault, complete=len(before) == 2)
        assert forked.run(forked.sweep, root, SWEEP, False) == 0
        assert same(root, whole), names[at - 1]
        assert not set(before) & set(computed(root)[len(begun) :]), names[at - 1]
        assert before.items() <= contents(root).items()
        kept.append(len(before))
    assert set(kept) == {0, 1, 2}
    record_property("story", f"sweep, {fault} at each of {len(names)} steps: {counted(names)}")


def counted(names: list[str]) -> str:
    kinds = Counter(name.partition(" ")[0] for name in names)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def runs_of(root: Path) -> list[dict[str, Any]]:
    """Return what the store shows of each run, without what is another in each store."""
    with closing(sqlite3.connect(root / "mlflow.db")) as connection:

        def found(what: str, table: str, run: str) -> list[Any]:
            query = f"SELECT {what} FROM {table} WHERE run_uuid = ? ORDER BY 1"  # noqa: S608
            return connection.execute(query, (run,)).fetchall()

        runs = [run for (run,) in connection.execute("SELECT run_uuid FROM runs ORDER BY 1")]
        shown = [
            {
                "id": run,
                "status": found("status", "runs", run),
                "params": found("key, value", "params", run),
                "metrics": found("key, value", "latest_metrics", run),
                "tags": {k: v for k, v in found("key, value", "tags", run) if k not in OWN},
                "files": sorted(p.name for p in root.glob(f"artifacts/{run}/**/*") if p.is_file()),
            }
            for run in runs
        ]
    return sorted(shown, key=lambda run: json.dumps(run["tags"], sort_keys=True))


@FAULTS
def test_the_tracking_store_at_each_step(
    tmp_path: Path, database: Path, fault: str, record_property: Any
) -> None:
    whole = _with_a_record(tmp_path / "whole/root", database)
    assert forked.run(forked.log, whole) == 0
    names, record = steps_of(whole.parent), finished()
    expected = [{**run, "id": None} for run in runs_of(whole)]
    assert len(expected) == 4
    for at in range(1, len(names) + 1):
        root = _with_a_record(tmp_path / f"{at}/root", database)
        code = forked.run(forked.log, root, at, fault)
        complete = on_disk(root, record)["mlflow_run_id"] is not None
        check_outcome(code, root.parent, fault, complete)
        assert store.equal(on_disk(root, record), record)
        assert forked.run(forked.log, root) == 0
        runs = runs_of(root)
        assert [{**run, "id": None} for run in runs] == expected, names[at - 1]
        (child,) = [run for run in runs if run["tags"].get("gear.key") == record["key"]]
        assert on_disk(root, record)["mlflow_run_id"] == child["id"]
    record_property("story", f"MLflow, {fault} at each of {len(names)} steps: {counted(names)}")


def _with_a_record(root: Path, database: Path | None) -> Path:
    """Make a results root with one record that MLflow does not show yet."""
    root.mkdir(parents=True)
    if database is not None:
        shutil.copy(database, root / "mlflow.db")
    commit(root, [finished()])
    return root


def test_a_database_is_whole_or_not_there(tmp_path: Path) -> None:
    root = _with_a_record(tmp_path / "root", None)
    for at in (2, 30, 60):  # of the 68 commits with which MLflow makes one
        assert forked.run(forked.log, root, at) == -9
        assert not (root / "mlflow.db").exists()
    assert forked.run(forked.log, root) == 0
    assert steps_of(tmp_path).index("rename .mlflow.db*") > 60
    assert len(runs_of(root)) == 2
