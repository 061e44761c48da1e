"""A real worker that dies, or whose disk fills up, at each step in which it writes.

The tiny model is evaluated for real; half a line of a sample is what a kill leaves of it. The same
job then gives the result that it gives when nothing happens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evals import record as store
from evals.job import Job, build_job
from evals.worker_client import Worker
from tests.evals.configs import small
from tests.faults.steps import FULL, KILL, SPACE
from tests.faults.test_every_write_step import FAULTS, counted

pytestmark = pytest.mark.fault
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def sound() -> Iterator[Worker]:
    """A worker to which nothing happens, for what comes before and behind a fault."""
    with Worker() as worker:
        yield worker


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[tuple[Job, Job]]:
    """The fp16 arm and a job that is compared with it, in a root of their own each time."""

    def fresh() -> Iterator[tuple[Job, Job]]:
        number = 0
        while True:
            number += 1
            job = build_job(small("kivi"), tmp_path / str(number) / "root")
            assert job.baseline is not None
            yield job.baseline, job

    return fresh()


def body_of(worker: Worker, job: Job) -> dict[str, Any]:
    """Return what a worker says of a job, as far as it must repeat."""
    body = worker.run(job.spec, lambda event: None)
    return {"key": job.key, "config": job.config, **body}


def armed(job: Job, at: int, fault: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a job in a worker of its own in which step ``at`` goes wrong."""
    root = Path(job.spec["root"])
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "armed"), str(HERE.parents[1])]))
        patch.setenv("FAULT_FOLDER", str(root))
        patch.setenv("FAULT_NOTES", str(root.parent / "notes.txt"))
        patch.setenv("FAULT_AT", str(at))
        patch.setenv("FAULT_KIND", fault)
        with Worker() as worker:
            return body_of(worker, job)


@FAULTS
@pytest.mark.parametrize("arm", ["fp16", "kivi"])
def test_each_step(
    arm: str, fault: str, jobs: Iterator[tuple[Job, Job]], sound: Worker,
    monkeypatch: pytest.MonkeyPatch, record_property: Any,
) -> None:  # fmt: skip
    def ready() -> Job:
        baseline, job = next(jobs)
        if arm == "fp16":
            return baseline
        body_of(sound, baseline)
        return job

    first = ready()
    whole = armed(first, 0, KILL, monkeypatch)
    assert whole["status"] == "FINISHED", whole
    names = (Path(first.spec["root"]).parent / "notes.txt").read_text().splitlines()
    for at in range(1, len(names) + 1):
        if fault == FULL and names[at - 1].startswith("rename"):
            continue  # takes no room: the same as the step behind it
        job = ready()
        body = armed(job, at, fault, monkeypatch)
        if fault == KILL:
            assert body["error"]["signal"] == "SIGKILL", names[at - 1]
        elif body["status"] == "FAILED":
            assert SPACE in str(body["error"]), names[at - 1]
        assert store.equal(body_of(sound, job), whole), names[at - 1]
        samples = store.record_dir(Path(job.spec["root"]), job.key) / store.SAMPLES
        assert len(store.read_samples(samples)) == 2
    assert names.count("sample") == 2
    record_property(
        "story", f"worker ({arm}), {fault} at each of {len(names)} steps: {counted(names)}"
    )
