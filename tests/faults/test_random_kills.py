"""kill -9 of a real sweep at a random moment, then the same command until it is done.

``--kill-seeds N`` makes N campaigns (default 20). Half of the moments are uniform over the time
that the sweep takes when nothing happens to it, half fall into a job drawn at random. Even seeds
kill the worker with it, as a power cut would; odd ones leave it to find its pipe closed.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from evals import record as store
from tests.faults.test_every_write_step import contents, same

pytestmark = pytest.mark.fault
HERE = Path(__file__).parent
NAMES = ["one", "two", "three", "four", "five", "six"]
"""With their fp16 arm seven jobs of KIVI, each a key of its own by its name."""


def start(root: Path) -> subprocess.Popen[str]:
    """Start the sweep, alone in its process group."""
    command = [sys.executable, str(HERE / "sweep.py"), str(root), *NAMES]
    return subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )


def finish(root: Path) -> float:
    """Run the sweep to its end; return how many seconds it took."""
    begun = time.monotonic()
    sweep = start(root)
    output, _ = sweep.communicate(timeout=240)
    assert sweep.returncode == 0, output
    return time.monotonic() - begun


def kill(root: Path, jobs: int, moment_s: float, with_worker: bool) -> bool:
    """Start the sweep and kill it so long after ``jobs`` were done; tell whether it still ran."""
    sweep = start(root)
    try:
        while sweep.poll() is None and len(list(root.glob("records/*/record.json"))) < jobs:
            time.sleep(0.005)
        sweep.wait(moment_s)
    except subprocess.TimeoutExpired:
        parent = psutil.Process(sweep.pid)
        victims = [*(parent.children(recursive=True) if with_worker else []), parent]
        for victim in victims:
            victim.kill()
        psutil.wait_procs(victims, 30)
        return True
    finally:
        sweep.communicate()
    return False


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A results root that nothing happened to, and how many seconds it took."""
    root = tmp_path_factory.mktemp("uninterrupted")
    return root, finish(root)


def test_a_sweep_killed_at_random(
    kill_seed: int, uninterrupted: tuple[Path, float], tmp_path: Path, record_property: Any
) -> None:
    whole, duration_s = uninterrupted
    draw = random.Random(kill_seed)  # noqa: S311
    story, kept = [], {}
    for _ in range(draw.choice([1, 1, 2])):
        jobs = draw.randint(1, len(NAMES)) if kill_seed % 4 >= 2 else 0
        moment_s = draw.uniform(0, duration_s / 50 if jobs else duration_s)
        killed = kill(tmp_path, jobs, moment_s, with_worker=kill_seed % 2 == 0)
        found = contents(tmp_path)
        assert kept.items() <= found.items()  # what was finished was not computed again
        kept = found
        when = f"{moment_s:.2f} s{f' after job {jobs}' if jobs else ''}"
        story.append(f"{'killed at' if killed else 'done before'} {when}, {on_disk(tmp_path)}")
    finish(tmp_path)
    assert kept.items() <= contents(tmp_path).items()
    assert same(tmp_path, whole)
    told = "; ".join(story)
    record_property("story", f"seed {kill_seed:3d} of {duration_s:.2f} s: {told}; rerun: equal")


def on_disk(root: Path) -> str:
    """Return what a killed sweep left, in words."""
    files = [path for path in root.glob("records/*/*") if path.is_file()]
    begun = sum(path.name == store.LOG for path in files)
    torn = sum(path.name.startswith((".record.json.", ".samples.jsonl.")) for path in files)
    return f"{len(contents(root))} finished of {begun} begun, {torn} torn files"
