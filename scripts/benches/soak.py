"""A sweep of hundreds of tiny jobs: memory stays flat, a job costs what the first ones did.

``run.py -m`` as a user runs it, with an empty results root: ``--limit`` settings of GEAR (500) on
the tiny model, which share their fp16 arm. Twice a second the resident memory of the command and of
its worker is taken, with the number of records by then. Compared are tenths of the sweep, the
second (everything is loaded by then) with the last. Then MLflow is served as scripts/ui.py does and
asked for what its page of runs asks. ``--plot FILE`` draws the curves.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess  # run.py is measured as its user runs it
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from benches.sweep import RUN, TINY
from benches.timing import MIB, Options, Row, at_most

JOBS, EVERY_S, FLAT, PAGE_S = 500, 0.5, 1.10, 2.0
UI = RUN.parent / "scripts" / "ui.py"
SHOWN = 100
"""Runs that MLflow's page asks for at a time."""


class Seen(NamedTuple):
    """One look at the sweep."""

    seconds: float
    records: int
    command: int
    """Bytes resident."""
    worker: int
    """Bytes resident; 0 while there is none."""


def run(options: Options) -> list[Row]:
    """Run the sweep, look at it while it runs, ask its pages, and compare its tenths."""
    count = options.limit or JOBS
    with tempfile.TemporaryDirectory() as root:
        environment = {**os.environ, "GEAR_MLRUNS": root}
        seen, total_s = _watched(_words(count), environment, Path(root))
        pages = _pages(environment)
    if options.plot is not None:
        _draw(seen, options.plot)
    early, late = _tenth(seen, count, 1), _tenth(seen, count, 9)
    rows: list[Row] = [
        {"name": f"a sweep of {count} tiny jobs, start to exit", "median_ms": 1e3 * total_s},
        {"name": "a job, second tenth", "median_ms": _per_job(early)},
        {"name": "a job, last tenth", "median_ms": _per_job(late)},
        at_most("a job: last tenth over second", _per_job(late) / _per_job(early), FLAT, "x"),
    ]
    for what in ("command", "worker"):
        first, last = (median(getattr(s, what) for s in part) for part in (early, late))
        rows += [
            {"name": f"{what}: resident, second tenth", "mib": first / MIB},
            {"name": f"{what}: resident, last tenth", "mib": last / MIB},
            at_most(f"{what}: last tenth over second", last / first, FLAT, "x"),
        ]
    for name, taken_s in pages.items():
        rows += [{"name": name, "median_ms": 1e3 * taken_s}, at_most(name, taken_s, PAGE_S, " s")]
    return [{"bar": "", **row} for row in rows]


def _words(count: int) -> list[str]:
    """Return a sweep of ``count`` settings that all share the fp16 arm."""
    shares = ",".join(f"{0.02 + i / 100_000:.5f}" for i in range(count))
    return ["-m", *TINY, f"gear.sparse_frac={shares}"]


def _watched(words: list[str], environment: dict[str, str], root: Path) -> tuple[list[Seen], float]:
    """Return looks at the command while it runs, and its seconds. RuntimeError where it fails."""
    start, seen = time.perf_counter(), []
    with (root / "output.txt").open("w+b") as output:
        command = [sys.executable, str(RUN), *words]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)  # noqa: S603
        while process.poll() is None:
            found = _look(process.pid, root)
            if found is not None:
                seen.append(Seen(time.perf_counter() - start, *found))
            time.sleep(EVERY_S)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"the sweep failed:\n{output.read()[-2000:].decode()}")
    return seen, time.perf_counter() - start


def _look(pid: int, root: Path) -> tuple[int, int, int] | None:
    """Return records so far and the resident bytes of command and worker; None at its end."""
    try:
        process = psutil.Process(pid)
        own = process.memory_info().rss
        children = [c for c in process.children() if "evals.worker" in c.cmdline()]
        workers = sum(child.memory_info().rss for child in children)
    except psutil.Error:
        return None
    return len(list(root.glob("records/*/record.json"))), own, workers


def _tenth(seen: list[Seen], count: int, number: int) -> list[Seen]:
    """Return the looks at one tenth of the jobs, from 0; the worker was there."""
    first, last = number * count / 10, (number + 1) * count / 10
    return [s for s in seen if first <= s.records <= last and s.worker]


def _per_job(part: list[Seen]) -> float:
    """Return the ms that a job of this part took."""
    return 1e3 * (part[-1].seconds - part[0].seconds) / (part[-1].records - part[0].records)


def _pages(environment: dict[str, str]) -> dict[str, float]:
    """Return the seconds of what MLflow's page of runs asks its server."""
    with _served(environment) as port:
        experiments = {"max_results": 1000}
        found, taken_s = _asked(port, "experiments/search", experiments)
        ids = [item["experiment_id"] for item in found["experiments"]]
        query = {"experiment_ids": ids, "max_results": SHOWN}
        runs, runs_s = _asked(port, "runs/search", query)
    if not runs["runs"]:
        raise RuntimeError("MLflow shows no runs")
    return {"MLflow: experiments": taken_s, f"MLflow: {len(runs['runs'])} newest runs": runs_s}


@contextmanager
def _served(environment: dict[str, str]) -> Iterator[int]:
    """Serve the results root; give the port, once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(UI), "--port", str(port)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        if not any("MLflow is at" in line for line in server.stdout or ()):
            raise RuntimeError("MLflow did not start")
        yield port
    finally:
        server.terminate()
        server.wait()


def _asked(port: int, what: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the server's answer and the seconds it took, the second time: the page is warm."""
    answer, taken_s = {}, 0.0
    for _ in range(2):
        start = time.perf_counter()
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", f"/api/2.0/mlflow/{what}", json.dumps(body), headers)
            answer = json.load(connection.getresponse())
        taken_s = time.perf_counter() - start
    return answer, taken_s


def _draw(seen: list[Seen], path: Path) -> None:
    """Draw records and memory against time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    seconds = [s.seconds for s in seen]
    left.plot(seconds, [s.records for s in seen], color="#0072B2")
    left.set(xlabel="seconds", ylabel="records", title="a straight line: a job costs the same")
    for what, colour in (("command", "#D55E00"), ("worker", "#009E73")):
        right.plot(seconds, [getattr(s, what) / MIB for s in seen], color=colour, label=what)
    right.set(xlabel="seconds", ylabel="MiB resident", title="memory", ylim=(0, None))
    right.legend()
    figure.savefig(path, dpi=120)
