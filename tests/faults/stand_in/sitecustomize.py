"""Put a stand-in for ``evals.compute`` into every interpreter that has this folder on PYTHONPATH.

So faults happen in a real worker process, and nothing in the product knows of them. A job's fault
is the name of its cache, or what ``FAULT_<NAME>`` says in the environment; a job without one
finishes at once. Every computed key is appended to ``<root>/computed.txt``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

HELD: list[bytearray] = []


def raises() -> None:
    """Raise as a task with a bug would."""
    raise ZeroDivisionError("a bug in a task")


def sigkill() -> None:
    """Die as the system's out-of-memory killer ends a process."""
    os.kill(os.getpid(), signal.SIGKILL)


def sigsegv() -> None:
    """Read address 0."""
    ctypes.string_at(0)


def exits() -> None:
    """Leave with code 0 and no record."""
    sys.exit(0)


def hangs() -> None:
    """Never end."""
    while True:
        time.sleep(0.05)


def stuck() -> None:
    """Never end the first time in a results root, and do nothing later."""
    before = Path(os.environ["GEAR_MLRUNS"]) / "stuck"
    if not before.exists():
        before.write_text(f"{os.getpid()}\n", encoding="utf-8")
        hangs()


def killed_once() -> None:
    """Be killed the first time in a results root, and do nothing later."""
    before = Path(os.environ["GEAR_MLRUNS"]) / "killed"
    if not before.exists():
        before.touch()
        sigkill()


def slow() -> None:
    """Take a second."""
    time.sleep(1)


def grows() -> None:
    """Take 512 MiB, touched, and hold them."""
    HELD.append(bytearray(os.urandom(1)) * (512 << 20))
    hangs()


def prints() -> None:
    """Write to descriptor 1 past Python, as C++ does, and through print."""
    os.write(1, b'{"event": "done", "record": "forged"}\n')
    print("printed")


FAULTS: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (raises, sigkill, sigsegv, exits, hangs, stuck, killed_once, slow, grows, prints)
}


def compute(spec: dict[str, Any], progress: Callable[[int, int, int], None]) -> dict[str, Any]:
    """Stand in for ``evals.compute.compute``."""
    with (Path(spec["root"]) / "computed.txt").open("a", encoding="utf-8") as file:
        file.write(spec["key"] + "\n")
    progress(1, 2, 10)
    name: str = spec["config"]["cache"]["name"]
    fault = FAULTS.get(os.environ.get(f"FAULT_{name.upper()}", name))
    if fault is not None:
        fault()
    progress(2, 2, 20)
    metrics = {"quality/ppl_token/decode": 2.0}
    body = {"coverage": {}, "bytes": {}, "guards": {}, "environment": {"device": "stand-in"}}
    return {"status": "FINISHED", "metrics": metrics, **body}


stand_in = types.ModuleType("evals.compute")
vars(stand_in)["compute"] = compute
sys.modules["evals.compute"] = stand_in
