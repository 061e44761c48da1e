"""The worker process: computes the jobs that :mod:`evals.worker_client` sends, one after another.

JSON lines: ``{"run": spec}`` comes in on stdin, ``{"event": "log" | "progress" | "done", ...}``
goes out on what was stdout. Descriptors 1 and 2 become the running job's log.txt, so that nothing a
library prints, C++ included, gets into the protocol. The process ends when its stdin closes. It
alone imports MLX, and never MLflow or Hydra.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from evals.blas import REFERENCE, load_optimised_blas
from evals.record import LOG, failure, record_dir
from gear import cuda_environment

Send = Callable[[dict[str, Any]], None]


def main() -> None:
    """Serve jobs until the parent closes the pipe."""
    send = _take_stdout()
    faulthandler.enable()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    for spec in _jobs():
        _log_to(record_dir(Path(spec["root"]), spec["key"]) / LOG)
        send({"event": "done", "record": _run(spec, send)})


def _take_stdout() -> Send:
    """Keep what was stdout for the protocol; prints go to the log, line by line."""
    wire = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)

    def send(event: dict[str, Any]) -> None:
        wire.write(json.dumps(event, allow_nan=False) + "\n")
        wire.flush()

    return send


def _log_to(path: Path) -> None:
    """Make descriptors 1 and 2 append to ``path``."""
    sys.stdout.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _jobs() -> Iterator[dict[str, Any]]:
    """Yield the jobs as they come; when the pipe closes the process ends at once, job or no job.

    Otherwise a killed sweep would leave a worker behind that computes on for nobody.
    """
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            inbox.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(inbox.get())["run"]


def _run(spec: dict[str, Any], send: Send) -> dict[str, Any]:
    """Return the record's body; an exception becomes a FAILED one, its traceback is in the log."""

    def progress(done: int, total: int, tokens: int) -> None:
        send({"event": "progress", "done": done, "total": total, "tokens": tokens})

    try:
        cuda_environment.set_up()
        blas = load_optimised_blas()
        print(f"worker {os.getpid()}, BLAS: {blas}")
        _announce(blas, send)
        from evals.compute import compute  # MLX comes in here, so only after the BLAS

        body = compute(spec, progress)
        body["environment"]["blas"] = blas
    except Exception as error:
        traceback.print_exc()
        return failure(type(error).__name__, str(error))
    return body


@cache
def _announce(blas: str, send: Send) -> None:
    """Tell the parent, once a process, which BLAS is used."""
    level = "warning" if blas == REFERENCE else "info"
    send({"event": "log", "level": level, "text": f"BLAS: {blas}"})


if __name__ == "__main__":
    main()
