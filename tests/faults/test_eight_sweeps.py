"""Eight sweeps of the same jobs started at once on a fresh folder, MLflow included.

By hand, with a real model: the command in README.md here.
"""

from __future__ import annotations

import os
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from evals import record as store
from tests.faults import forked
from tests.faults.test_every_write_step import computed, runs_of

pytestmark = pytest.mark.fault
NAMES = ["one", "slow", "two"]


def _sweep(root: Path, barrier: Barrier) -> None:
    """Begin when all others do; each keeps what it prints beside the root."""
    own = root.parent / str(os.getpid())
    own.mkdir()
    barrier.wait(120)
    forked.sweep(root, NAMES, tracked=True, told=own)


def test_eight_sweeps_at_once_on_a_fresh_folder(tmp_path: Path) -> None:
    root = tmp_path / "root"
    context = forked.context()
    barrier = context.Barrier(8)
    sweeps = [context.Process(target=_sweep, args=(root, barrier)) for _ in range(8)]
    for sweep in sweeps:
        sweep.start()
    for sweep in sweeps:
        sweep.join(300)
    said = "\n".join(path.read_text() for path in tmp_path.glob("*/out.txt"))
    assert [sweep.exitcode for sweep in sweeps] == [0] * 8, said
    assert "Traceback" not in said
    assert len(computed(root)) == len(set(computed(root))) == len(NAMES) + 1
    records = list(store.records(root))
    assert [record["status"] for record in records] == ["FINISHED"] * 4
    runs = runs_of(root)
    keys = sorted(run["tags"].get("gear.key", "") for run in runs)
    assert keys == ["", *sorted(record["key"] for record in records)]
    assert {status for run in runs for (status,) in run["status"]} == {"FINISHED"}
    assert {record["mlflow_run_id"] for record in records} < {run["id"] for run in runs}
