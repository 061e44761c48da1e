"""Sweeps of small jobs through ``run.py`` and a launcher, in processes that a test may kill."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from evals import record as store

CHECKOUT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in"
CACHES = "cache=fp16,kivi,gear_l,gear"
SMALL = (
    "model=tiny", "dataset.limit=2", "eval.prefill_tokens=128", "eval.scored_tokens=64",
    "eval.bootstrap_samples=50",
)  # fmt: skip
LAUNCHERS = {
    "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    "submitit_local": ("hydra/launcher=submitit_local",),
    "ray": ("hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"),
}
"""What each is given beside the jobs: two at a time, where it has a number for that."""


def launchers() -> list[object]:
    """Return the launchers as a test's parameters; what is not installed is skipped."""
    return [pytest.param(name, marks=_needs(name)) for name in LAUNCHERS]


def _needs(launcher: str) -> pytest.MarkDecorator:
    """Skip without the launcher's plugin."""
    reason = f"hydra/launcher={launcher} is not installed: pip install -e '.[cluster]'"
    return pytest.mark.skipif(not installed(launcher), reason=reason)


def installed(launcher: str) -> bool:
    """Tell whether the launcher's plugin is there."""
    plugin = f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher"
    return find_spec("hydra_plugins") is not None and find_spec(plugin) is not None


def begin(root: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Start ``run.py -m`` on a job for each cache in a results root."""
    environment = {**os.environ, "GEAR_MLRUNS": str(root), "HOME": str(root.parent), **variables}
    command = [sys.executable, str(CHECKOUT / "run.py"), "-m", *SMALL, CACHES, *words]
    return subprocess.Popen(  # noqa: S603
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root.parent,
    )


def ended(sweep: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a sweep; return its exit code, stdout and stderr."""
    out, err = sweep.communicate(timeout=240)
    return sweep.returncode, out, err


def stand_in(**faults: str) -> dict[str, str]:
    """Return the variables that put the stand-in into workers, with a fault for a cache."""
    paths = os.pathsep.join([str(STAND_IN), str(CHECKOUT)])
    return {"PYTHONPATH": paths, **{f"FAULT_{k.upper()}": v for k, v in faults.items()}}


def table(out: str) -> list[list[str]]:
    """Return the cells of a printed table, without what time decides."""
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]
    dropped = rows[0].index("tok/s") if rows and "tok/s" in rows[0] else None
    return [[c for i, c in enumerate(row) if i != dropped] for row in rows]


def same(a: Path, b: Path) -> bool:
    """Tell whether two results roots hold equal records, all finished."""
    pairs = list(zip(store.records(a), store.records(b), strict=True))
    finished = all(record["status"] == "FINISHED" for pair in pairs for record in pair)
    return finished and all(store.equal(*pair) for pair in pairs)


def computed(root: Path) -> list[str]:
    """Return the keys in the order in which workers began them."""
    return (root / "computed.txt").read_text().split()
