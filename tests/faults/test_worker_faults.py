"""Workers that die, hang or grow, and sweeps that are killed, each in real processes.

The faults are in ``stand_in/sitecustomize.py``, which the workers load instead of computing.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from evals import record as store
from evals.job import build_job
from evals.runner import Session
from evals.worker_client import Worker
from tests.evals.configs import small

pytestmark = pytest.mark.fault
HERE = Path(__file__).parent


def ignore(event: dict[str, Any]) -> None:
    """Watch a job without looking."""


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(HERE / "stand_in"), str(HERE.parents[1])])
    )


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def spec_of(root: Path, name: str, **changes: Any) -> dict[str, Any]:
    return {**build_job(small(name, method="kivi"), root).spec, **changes}


def log_of(spec: dict[str, Any]) -> str:
    return (store.record_dir(Path(spec["root"]), spec["key"]) / "log.txt").read_text()


def pid_of(spec: dict[str, Any]) -> int:
    found = re.search(r"worker (\d+)", log_of(spec))
    assert found is not None
    return int(found[1])


def wait_for(condition: Callable[[], Any], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {within_s:g} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Tell whether a process runs (an orphan that nobody waits for may stay as a zombie)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("name", "limits", "kind", "ended_by", "said"),
    [
        ("raises", {}, "ZeroDivisionError", None, "a bug in a task"),
        ("sigkill", {}, "WorkerKilled", "SIGKILL", "SIGKILL; out of memory?"),
        ("sigsegv", {}, "WorkerKilled", "SIGSEGV", "SIGSEGV"),
        ("exits", {}, "WorkerExit", None, "exit code 0 and no record"),
        ("hangs", {"time_limit_s": 3}, "TimeLimit", "SIGKILL", "job.time_limit_s=3"),
        ("grows", {"memory_limit_gib": 0.3}, "MemoryLimit", "SIGKILL", "job.memory_limit_gib=0.3"),
    ],
)
def test_a_fault_fails_its_job_and_the_next_one_runs(
    tmp_path: Path, worker: Worker, name: str, limits: dict[str, float], kind: str,
    ended_by: str | None, said: str,
) -> None:  # fmt: skip
    spec = spec_of(tmp_path, name, **limits)
    body = worker.run(spec, ignore)
    assert (body["status"], body["error"]["type"]) == ("FAILED", kind)
    assert body["error"]["signal"] == ended_by
    assert said in body["error"]["message"]
    assert body["error"]["log_tail"] == log_of(spec).rstrip("\n")
    good = spec_of(tmp_path, "good")
    assert worker.run(good, ignore)["status"] == "FINISHED"
    assert (pid_of(good) == pid_of(spec)) == (name == "raises")
    wait_for(lambda: name == "raises" or not alive(pid_of(spec)))


def test_the_log_tail_says_where_it_died(tmp_path: Path, worker: Worker) -> None:
    crashed = worker.run(spec_of(tmp_path, "sigsegv"), ignore)
    assert "Segmentation fault" in crashed["error"]["log_tail"]
    assert "in sigsegv" in crashed["error"]["log_tail"]
    raised = worker.run(spec_of(tmp_path, "raises"), ignore)
    assert raised["error"]["log_tail"].endswith("ZeroDivisionError: a bug in a task")


def test_what_a_job_prints_is_in_its_own_log_and_not_in_the_protocol(
    tmp_path: Path, worker: Worker
) -> None:
    spec, good = spec_of(tmp_path, "prints"), spec_of(tmp_path, "good")
    assert worker.run(spec, ignore)["status"] == "FINISHED"
    assert worker.run(good, ignore)["status"] == "FINISHED"
    assert "forged" in log_of(spec)
    assert "printed" in log_of(spec)
    assert "printed" not in log_of(good)


def test_a_worker_is_kept_for_the_model_and_started_afresh_for_another(
    tmp_path: Path, worker: Worker
) -> None:
    specs = [spec_of(tmp_path, name) for name in ("one", "two", "other")]
    specs[2]["model"]["weight_hash"] = "another"
    for spec in specs:
        assert worker.run(spec, ignore)["status"] == "FINISHED"
    one, two, other = map(pid_of, specs)
    assert one == two != other
    assert not alive(one)


def test_a_worker_that_died_between_jobs_is_replaced(tmp_path: Path, worker: Worker) -> None:
    spec = spec_of(tmp_path, "one")
    worker.run(spec, ignore)
    pid = pid_of(spec)
    assert worker._process is not None
    worker._process.kill()
    worker._process.wait()
    assert worker.run(spec, ignore)["status"] == "FINISHED"
    assert pid_of(spec) != pid


def test_an_interrupt_ends_the_worker(tmp_path: Path, worker: Worker) -> None:
    def interrupt(event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            raise KeyboardInterrupt

    spec = spec_of(tmp_path, "hangs")
    with pytest.raises(KeyboardInterrupt):
        worker.run(spec, interrupt)
    assert not alive(pid_of(spec))


def test_a_job_that_dies_inside_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = [small(name, method="kivi") for name in ("before", "sigsegv", "after")]
    with Session(tmp_path, [], configs) as session:
        records = [session.run(config) for config in configs]
        assert session.finish() == 1
    assert [record["status"] for record in records] == ["FINISHED", "FAILED", "FINISHED"]
    on_disk = store.load(tmp_path, records[1]["key"])
    assert on_disk is not None
    assert on_disk["error"]["signal"] == "SIGSEGV"
    assert "SIGSEGV" in capsys.readouterr().out


def test_a_job_whose_worker_is_killed_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path))
    config = small("killed_once", method="kivi")
    with Session(tmp_path, [], [config]) as session:
        record = session.run(config)
        assert (record["status"], record["environment"]["attempts"]) == ("FINISHED", 2)
        assert session.finish() == 0


@pytest.mark.parametrize(
    ("name", "retries", "times"), [("sigkill", 2, 3), ("sigkill", 0, 1), ("raises", 2, 1)]
)
def test_only_what_may_go_well_is_run_again(
    tmp_path: Path, name: str, retries: int, times: int
) -> None:
    config = small(name, method="kivi")
    config = replace(config, job=replace(config.job, retries=retries))
    with Session(tmp_path, [], [config]) as session:
        record = session.run(config)
    assert record["status"] == "FAILED"
    assert computed(tmp_path).count(record["key"]) == times


def test_fail_fast_runs_no_more_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = [small(name, method="kivi") for name in ("before", "raises", "after", "last")]
    configs = [replace(c, job=replace(c.job, fail_fast=True)) for c in configs]
    with Session(tmp_path, [], configs) as session:
        records = [session.run(config) for config in configs]
        assert session.finish() == 1
    assert [r["status"] for r in records] == ["FINISHED", "FAILED", "FAILED", "FAILED"]
    assert len(computed(tmp_path)) == 3  # fp16, before, raises
    assert "job.fail_fast=true: 2 jobs were not run." in capsys.readouterr().err
    undone = [replace(c, job=replace(c.job, fail_fast=False)) for c in configs[2:]]
    with Session(tmp_path, [], undone) as session:
        assert [session.run(config)["status"] for config in undone] == ["FINISHED"] * 2


def test_an_fp16_arm_that_dies_fails_the_jobs_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_FP16", "sigkill")
    with Session(tmp_path, [], [small()]) as session:
        record = session.run(small())
    assert (record["error"]["type"], record["error"]["signal"]) == ("BaselineFailed", "SIGKILL")


def start_sweep(root: Path, *names: str) -> subprocess.Popen[str]:
    """Start a sweep in a process of its own."""
    command = [sys.executable, str(HERE / "sweep.py"), str(root), *names]
    return subprocess.Popen(  # noqa: S603
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def computed(root: Path) -> list[str]:
    """Return the keys in the order in which workers began them."""
    path = root / "computed.txt"
    return path.read_text().split() if path.exists() else []


def test_a_killed_sweep_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("one", "hangs", "three")
    sweep = start_sweep(tmp_path / "killed", *names)
    hanging = spec_of(tmp_path / "killed", "hangs")
    wait_for(lambda: hanging["key"] in computed(tmp_path / "killed"))
    sweep.kill()
    sweep.communicate()
    wait_for(lambda: not alive(pid_of(hanging)))
    before = computed(tmp_path / "killed")

    monkeypatch.setenv("FAULT_HANGS", "none")
    for root in ("killed", "uninterrupted"):
        done = start_sweep(tmp_path / root, *names)
        output, _ = done.communicate(timeout=60)
        assert done.returncode == 0, output
    resumed = computed(tmp_path / "killed")[len(before) :]
    assert resumed == [hanging["key"], spec_of(tmp_path / "killed", "three")["key"]]
    records = [list(store.records(tmp_path / root)) for root in ("killed", "uninterrupted")]
    assert len(records[0]) == 4
    assert all(store.equal(a, b) for a, b in zip(*records, strict=True))


def test_two_sweeps_at_once_compute_each_key_once(tmp_path: Path) -> None:
    sweeps = [start_sweep(tmp_path, "slow", "one") for _ in range(2)]
    for sweep in sweeps:
        output, _ = sweep.communicate(timeout=60)
        assert sweep.returncode == 0, output
    keys = computed(tmp_path)
    assert len(keys) == len(set(keys)) == 3


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_sweep_leaves_no_worker_and_keeps_its_records(
    tmp_path: Path, sent: signal.Signals
) -> None:
    sweep = start_sweep(tmp_path, "one", "hangs")
    hanging = spec_of(tmp_path, "hangs")
    wait_for(lambda: hanging["key"] in computed(tmp_path))
    os.killpg(sweep.pid, sent)  # as a terminal's Ctrl-C does
    sweep.communicate(timeout=60)
    assert sweep.returncode != 0
    wait_for(lambda: not alive(pid_of(hanging)))
    assert "KeyboardInterrupt" not in log_of(hanging)
    assert store.load(tmp_path, hanging["key"]) is None
    assert [record["status"] for record in store.records(tmp_path)] == ["FINISHED"] * 2


def test_a_kill_between_temporary_file_and_rename_leaves_the_old_record(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "one")
    record = {
        "key": spec["key"], "status": "FAILED", "config": spec["config"], "metrics": {},
        "guards": {}, "environment": {}, "started": "", "finished": "", "mlflow_run_id": None,
    }  # fmt: skip
    store.commit(tmp_path, spec["key"], record)
    code = (
        "import os, pathlib, sys; from evals import record as store\n"
        "root, key = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
        "record = store.load(root, key); record['status'] = 'FINISHED'\n"
        "pathlib.Path.replace = lambda self, to: os.kill(os.getpid(), 9)\n"
        "store.commit(root, key, record)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), spec["key"]]
    killed = subprocess.run(command, check=False)  # noqa: S603
    assert killed.returncode == -signal.SIGKILL
    assert store.load(tmp_path, spec["key"]) == record
    finished = {**record, "status": "FINISHED"}
    store.commit(tmp_path, spec["key"], finished)
    assert list(store.records(tmp_path)) == [finished]
