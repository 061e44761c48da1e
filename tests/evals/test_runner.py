"""Sessions: reuse, order, what is committed, what is shown, exit codes; on the tiny model."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evals import record as store
from evals import tracking
from evals.job import build_job
from evals.progress import JobBar
from evals.runner import Session
from evals.schema import Config
from evals.tracking_store import TrackingError
from evals.worker_client import Worker
from tests.evals.configs import small

FINISHED_BODY: dict[str, Any] = {
    "status": "FINISHED", "metrics": {"quality/ppl_token/decode": 2.0}, "guards": {},
    "coverage": {}, "bytes": {}, "environment": {"device": "stand-in"},
}  # fmt: skip


class FakeWorker:
    """Answers each job by its cache's name, without a process."""

    def __init__(self, **bodies: dict[str, Any]) -> None:
        self.bodies, self.ran = bodies, []

    def run(self, spec: dict[str, Any], watch: Any) -> dict[str, Any]:
        name = spec["config"]["cache"]["name"]
        self.ran.append(name)
        watch({"event": "progress", "done": 1, "total": 1, "tokens": 1})
        return dict(self.bodies.get(name, FINISHED_BODY))

    def close(self) -> None:
        """Nothing to end."""


def session_of(
    root: Path, configs: list[Config], worker: FakeWorker | None = None
) -> tuple[Session, FakeWorker]:
    """Return a session with a worker that computes nothing."""
    session, worker = Session(root, ["x"], configs), worker or FakeWorker()
    session._worker = worker  # pyright: ignore[reportAttributeAccessIssue]
    return session, worker


def test_a_sweep_end_to_end_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = [small(), small("kivi"), small("fp16")]
    with Session(tmp_path, ["cache=gear,kivi,fp16", "-m"], configs) as session:
        records = [session.run(config) for config in configs]
        assert session.finish() == 0
    assert [record["status"] for record in records] == ["FINISHED"] * 3, records
    names = [record["config"]["cache"]["name"] for record in session.records.values()]
    assert names == ["fp16", "gear", "kivi"]
    assert not any("calibration" in record for record in records)
    for record in records:
        assert store.load(tmp_path, record["key"]) == record
        assert record["environment"]["blas"]
        assert record["mlflow_run_id"] is None
    assert "kivi" in capsys.readouterr().out

    again, worker = session_of(tmp_path, configs)
    assert [again.run(config) for config in configs] == records
    assert worker.ran == []


def test_the_fp16_arm_runs_once_and_first(tmp_path: Path) -> None:
    configs = [small(), small(rank=8), small("kivi")]
    session, worker = session_of(tmp_path, configs)
    for config in configs:
        session.run(config)
    assert worker.ran == ["fp16", "gear", "gear", "kivi"]


def test_a_failed_record_is_committed_and_tried_again_next_time(tmp_path: Path) -> None:
    failing = FakeWorker(gear=store.failure("GuardError", "finite: no"))
    session, _ = session_of(tmp_path, [small()], failing)
    record = session.run(small())
    assert store.load(tmp_path, record["key"]) == record
    assert (record["status"], session.finish()) == ("FAILED", 1)
    session.run(small())
    assert failing.ran == ["fp16", "gear"]

    session, worker = session_of(tmp_path, [small()])
    assert session.run(small())["status"] == "FINISHED"
    assert (worker.ran, session.finish()) == (["gear"], 0)


def test_a_failed_fp16_arm_fails_the_jobs_that_need_it(tmp_path: Path) -> None:
    broken = FakeWorker(fp16=store.failure("WorkerKilled", "gone", signal="SIGSEGV"))
    session, _ = session_of(tmp_path, [small(), small("kivi")], broken)
    records = [session.run(small()), session.run(small("kivi"))]
    assert broken.ran == ["fp16"] * 2  # once more, as a signal ended it
    for record in records:
        assert record["error"]["type"] == "BaselineFailed"
        assert "WorkerKilled: gone" in record["error"]["message"]
        assert store.load(tmp_path, record["key"]) == record


def test_a_config_that_cannot_be_used_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = [small(bits=9), small()]
    session, worker = session_of(tmp_path, configs)
    records = [session.run(config) for config in configs]
    assert (records[0]["key"], records[0]["status"]) == (None, "FAILED")
    assert records[1]["status"] == "FINISHED"
    assert session.finish() == 1
    assert "gear.bits=9: must be an integer in [1, 8]" in capsys.readouterr().err
    assert worker.ran == ["fp16", "gear"]


def test_a_job_without_its_calibration_file_fails_alone_and_has_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEAR_ASSETS", str(tmp_path))
    without = small("vecinfer")
    without.cache["calibration"] = "auto"
    configs = [without, small()]
    session, worker = session_of(tmp_path, configs)
    records = [session.run(config) for config in configs]
    assert [(r["status"], r["key"] is None) for r in records] == [
        ("FAILED", True), ("FINISHED", False),
    ]  # fmt: skip
    assert session.finish() == 1
    assert worker.ran == ["fp16", "gear"]
    out, err = capsys.readouterr()
    [row] = [line for line in out.splitlines() if line.startswith("| vecinfer")]
    assert row.endswith("| FAILED | - |")
    assert "- vecinfer: CalibrationMissing: vecinfer: calibration=auto" in out
    assert "| fp16 |" in out
    assert "scripts/calibrate.py method=vecinfer model=tiny" in err


@pytest.mark.fault
def test_a_full_disk_is_a_failed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(root: Path, key: str, record: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "commit", full)
    session, _ = session_of(tmp_path, [small("fp16")])
    assert session.run(small("fp16"))["status"] == "FAILED"
    assert session.finish() == 1
    err = capsys.readouterr().err
    assert "No space left on device" in err
    assert "GEAR_MLRUNS" in err


def test_tracking_gets_the_records_and_the_table_its_run_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small("fp16")
    config.tracking.enabled = True
    key = build_job(config, tmp_path).key
    calls: list[Any] = []

    def log_sweep(*arguments: Any) -> tracking.SweepView:
        calls.append(arguments)
        return tracking.SweepView("parent-run", {key: "child-run"}, "mlflow ui here")

    monkeypatch.setattr(tracking, "log_sweep", log_sweep)
    session, _ = session_of(tmp_path, [config])
    record = session.run(config)
    assert session.finish() == 0
    assert calls == [(tmp_path, [record], ["x"], config.tracking)]
    out = capsys.readouterr().out
    assert "child-ru" in out
    assert "mlflow ui here" in out


def test_a_tracking_error_costs_the_exit_code_and_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def log_sweep(*arguments: Any) -> None:
        raise TrackingError("mlflow.db", "locked", "Wait.")

    monkeypatch.setattr(tracking, "log_sweep", log_sweep)
    config = small("fp16")
    config.tracking.enabled = True
    session, _ = session_of(tmp_path, [config])
    record = session.run(config)
    assert session.finish() == 1
    assert store.load(tmp_path, record["key"]) == record
    output = capsys.readouterr()
    assert "fp16" in output.out
    assert "scripts/sync_mlflow.py" in output.err


def test_records_of_jobs_launched_in_other_processes_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = [small(), small("kivi"), small(bits=9)]
    elsewhere, _ = session_of(tmp_path, configs[:1])
    elsewhere.run(configs[0])
    session, worker = session_of(tmp_path, configs)
    assert session.finish() == 1
    names = [record["config"]["cache"]["name"] for record in session.records.values()]
    assert names == ["fp16", "gear"]
    assert worker.ran == []
    err = capsys.readouterr().err
    assert "kivi · tiny · embedded · decode" in err
    assert "left no record" in err
    assert "gear.bits=9" in err


def test_the_bar_shows_rate_on_a_terminal_and_only_warnings_elsewhere() -> None:
    events = [
        {"event": "log", "level": "info", "text": "BLAS: fast"},
        {"event": "log", "level": "warning", "text": "BLAS: slow"},
        {"event": "progress", "done": 1, "total": 2, "tokens": 640},
    ]

    def shown(terminal: bool) -> str:
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
        with JobBar("[1/3] gear · tiny", console) as bar:
            for event in events:
                bar(event)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    assert shown(terminal=False) == "BLAS: slow\n"
    for text in ("BLAS: fast", "[1/3] gear · tiny", "1/2", "tok/s"):
        assert text in shown(terminal=True)


def test_leaving_a_session_ends_its_worker(tmp_path: Path) -> None:
    session = Session(tmp_path, [], [small()])
    ended: list[bool] = []
    session._worker = Worker()
    session._worker.close = lambda: ended.append(True)
    with pytest.raises(KeyboardInterrupt), session:
        raise KeyboardInterrupt
    assert ended == [True]


def test_the_parent_imports_no_mlx() -> None:
    code = (
        "import sys, evals.runner, evals.worker_client;"
        "print([m for m in ('mlx', 'mlx_lm', 'mlflow', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    folder = Path(store.__file__).parents[1]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)  # noqa: S603
    assert out.stdout.strip() == "[]"
