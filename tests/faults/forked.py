"""What tests do in processes of their own that start in milliseconds and may be killed.

They are forked from a server that has imported MLflow and what draws figures once, single-threaded
and without MLX.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PRELOADED = [
    "mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store", "pandas", "evals.tracking",
    "evals.runner", "alembic.command", "alembic.config", "tests.faults.forked",
]  # fmt: skip


def context() -> ForkServerContext:
    """Return the context of every forked process; the server starts with the first one."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def run(target: Callable[..., Any], *args: Any) -> int | None:
    """Call ``target`` in a process; return its exit code, -9 where it was killed."""
    process = context().Process(target=target, args=args)
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
    return process.exitcode


def sweep(
    root: Path,
    names: Sequence[str],
    tracked: bool,
    at: int = 0,
    fault: str = "kill",
    told: Path | None = None,
) -> None:
    """Run a sweep of one job a name, workers' computing stood in for; exit as ``run.py`` does.

    What it prints and its steps go to files in ``told``, or beside the root.
    """
    from evals.runner import Session
    from tests.evals.configs import small
    from tests.faults.steps import Steps, arm

    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE / "stand_in"), str(HERE.parents[1])])
    configs = [small(name, method="kivi") for name in names]
    for config in configs:
        config.tracking.enabled = tracked
    told = told or root.parent
    steps = arm(Steps(root, at, fault))
    with (
        (told / "out.txt").open("w") as out,
        redirect_stdout(out),
        redirect_stderr(out),
        Session(root, list(names), configs) as session,
    ):
        for config in configs:
            session.run(config)
        code = session.finish()
    (told / "steps.json").write_text(json.dumps(steps.names))
    raise SystemExit(code)


def log(root: Path, at: int = 0, fault: str = "kill") -> None:
    """Show all records of a root in MLflow; the same as a sweep's end, without its jobs.

    What the figures hold is nothing to a fault, so a run gets two small files.
    """
    from evals import record as store
    from evals import tracking_runs
    from evals.schema import TrackingConfig
    from evals.tracking import log_sweep
    from evals.tracking_store import TrackingError
    from tests.faults.steps import Steps, arm

    def write(folder: Path, *_: Any) -> dict[str, str]:
        (folder / "figures").mkdir()
        (folder / "figures/a.csv").write_text("1\n")
        (folder / "table.md").write_text("a table\n")
        return {"files": "2"}

    tracking_runs.write_sweep = tracking_runs.write_job = write
    records = list(store.records(root))
    out = root.parent / "out.txt"
    out.write_text("")
    steps = arm(Steps(root, at, fault))
    try:
        log_sweep(root, records, ["some", "words"], TrackingConfig(name="mlflow"))
    except TrackingError as error:
        out.write_text(str(error))
        raise SystemExit(1) from error
    (root.parent / "steps.json").write_text(json.dumps(steps.names))
