"""The parent's side of the worker process: send a job, watch it, and turn any end into a record.

A worker that dies, hangs or grows over its limit costs its own job only: the body says FAILED with
the signal and the log's tail, and the next job gets a fresh process. One process serves the jobs of
one model after another; a job with another model, dtype or backend starts a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Self

import psutil

from evals.record import FAILED, LOG, failure, record_dir

POLL_S = 0.1
"""How often limits are checked."""
GRACE_S = 10.0
"""How long a worker may take to end by itself once its pipe is closed."""
LOST = "WorkerKilled"
"""The type of error of a job whose worker a signal ended: what may go well another time."""
TAIL_LINES = 30
"""Lines of the log that a FAILED record keeps."""

Watch = Callable[[dict[str, Any]], None]
"""Gets each event of a running job: progress (done, total, tokens) or log (level, text)."""


class Worker:
    """A worker process, started with its first job and kept for the next ones of the same model.

    What it puts in its scratch folder ends with it, however it ends.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._holds: tuple[Any, ...] = ()
        self._scratch: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, spec: dict[str, Any], watch: Watch) -> dict[str, Any]:
        """Return the body of the job's record, FINISHED or FAILED; its log.txt is written anew.

        A KeyboardInterrupt, or any other exception, ends the worker and goes through.
        """
        log = record_dir(Path(spec["root"]), spec["key"]) / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        try:
            process = self._ready(spec, log)
            body = self._outcome(process, spec, watch)
        except BaseException:
            self.kill()
            raise
        if body["status"] == FAILED:
            body["error"]["log_tail"] = _tail(log)
        return body

    def _ready(self, spec: dict[str, Any], log: Path) -> subprocess.Popen[str]:
        """Return a process that was sent the job: the one at hand, or a new one."""
        holds = (spec["model"], spec["config"]["dtype"], spec["config"]["backend"])
        process = self._process
        if process is None or process.poll() is not None or holds != self._holds:
            self.close()
            process = self._start(log)
            self._holds = holds
        job = {**spec, "scratch": self._scratch.name if self._scratch else None}
        with contextlib.suppress(BrokenPipeError):  # it is dead, which its exit will tell
            print(json.dumps({"run": job}, allow_nan=False), file=process.stdin, flush=True)
        return process

    def _start(self, log: Path) -> subprocess.Popen[str]:
        """Start a process that prints to ``log`` until its first job is there."""
        package = str(Path(__file__).resolve().parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        # -P: the user's folder is not searched for modules. The process group of its own keeps
        # Ctrl-C with the parent, which then ends the worker.
        command = [sys.executable, "-P", "-m", "evals.worker"]
        self._scratch = TemporaryDirectory(prefix="gear-worker-")
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                encoding="utf-8",
                process_group=0,
            )
        self._lines = queue.SimpleQueue()
        threading.Thread(
            target=_pump, args=(self._process.stdout, self._lines), daemon=True
        ).start()
        return self._process

    def _outcome(
        self, process: subprocess.Popen[str], spec: dict[str, Any], watch: Watch
    ) -> dict[str, Any]:
        """Wait for the job's end, whatever it is, and return its body."""
        started = time.monotonic()
        while True:
            try:
                line = self._lines.get(timeout=POLL_S)
            except queue.Empty:
                line = ""
            if line is None:
                return self._died(process)
            event = json.loads(line) if line else {}
            if event.get("event") == "done":
                return event["record"]
            if event:
                watch(event)
            if reason := _over_limit(process, spec, time.monotonic() - started):
                self.kill()
                return failure(*reason, signal="SIGKILL")

    def _died(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Return the body of a job whose process ended without a record."""
        self.close()
        code = process.returncode
        if code >= 0:
            return failure("WorkerExit", f"the worker ended with exit code {code} and no record")
        name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
        hint = "; out of memory?" if name == "SIGKILL" else ""
        return failure(LOST, f"the worker was ended by {name}{hint}", signal=name)

    def close(self) -> None:
        """End the process: it goes when its pipe closes, or is killed after a grace time."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self.close()


def _pump(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Move the process's lines into a queue, which can be read with a timeout; None is the end."""
    with stream:
        for line in stream:
            if line.endswith("\n"):  # else the process died while writing it
                lines.put(line)
    lines.put(None)


def _over_limit(
    process: subprocess.Popen[str], spec: dict[str, Any], elapsed_s: float
) -> tuple[str, str] | None:
    """Return the error's type and message where a limit is passed."""
    seconds, gib = spec["time_limit_s"], spec["memory_limit_gib"]
    if seconds is not None and elapsed_s > seconds:
        return "TimeLimit", f"over job.time_limit_s={seconds:g}; raise it, or make the job smaller"
    if gib is None:
        return None
    try:
        resident_gib = psutil.Process(process.pid).memory_info().rss / 2**30
    except psutil.Error:  # it has just ended
        return None
    if resident_gib > gib:
        return "MemoryLimit", f"{resident_gib:.2f} GiB resident, over job.memory_limit_gib={gib:g}"
    return None


def _tail(log: Path) -> str:
    """Return the last lines of a log, as far as there is one."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])
