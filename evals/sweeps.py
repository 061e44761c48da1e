"""Sweeps: which records one command asked for, so that the tracking view can be rebuilt from disk.

``<root>/sweeps/<jobset>.json`` holds the keys in their order, the command, the experiment and which
records were older than the sweep. The job set is the sha256 of the sorted keys: the same jobs are
the same sweep whatever order or command they came from. Its first command keeps it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evals import record as store

Record = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """One distinct set of jobs."""

    keys: list[str]
    """Record keys, in the order of the first command."""
    reused: list[str]
    """Those whose record an earlier sweep already had."""
    argv: list[str] | None
    """What followed run.py on the command line; None where no command is known."""
    experiment: str
    """MLflow experiment it is shown in."""

    @property
    def jobset(self) -> str:
        """Return the sha256 (64 hex) of the sorted keys."""
        return hashlib.sha256("\n".join(sorted(self.keys)).encode()).hexdigest()


def remember(root: Path, keys: Iterable[str], argv: Sequence[str], experiment: str) -> Sweep:
    """Return the sweep of these keys (each counts once), writing it if it is new.

    OSError where the results root cannot be written.
    """
    distinct = list(dict.fromkeys(keys))
    known = list(sweeps(root))
    seen = {key for sweep in known for key in sweep.keys}
    sweep = Sweep(distinct, [key for key in distinct if key in seen], list(argv), experiment)
    for other in known:
        if other.jobset == sweep.jobset:
            return other
    path = root / "sweeps" / f"{sweep.jobset}.json"
    store.write_whole(path, json.dumps(asdict(sweep), indent=1) + "\n")
    return sweep


def sweeps(root: Path) -> Iterator[Sweep]:
    """Yield every sweep under ``root`` that can be read, in the order of their names."""
    for path in sorted((root / "sweeps").glob("*.json")):
        try:
            sweep = Sweep(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue  # half a file after a power cut: its records are then shown one by one
        if sweep.jobset == path.stem:
            yield sweep


def with_records(root: Path, experiment: str) -> list[tuple[Sweep, list[Record]]]:
    """Return every sweep with those of its records that are on disk.

    A record of no sweep (tracking was off, or the sweep was killed) is a sweep of its own in
    ``experiment``.
    """
    records = {record["key"]: record for record in store.records(root)}
    known = list(sweeps(root))
    seen = {key for sweep in known for key in sweep.keys}
    alone = [Sweep([key], [], None, experiment) for key in records if key not in seen]
    pairs = [(s, [records[key] for key in s.keys if key in records]) for s in (*known, *alone)]
    return [(sweep, found) for sweep, found in pairs if found]
