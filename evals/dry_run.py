"""``job.dry_run=true``: every job of a command with its state, and nothing computed.

A job is done, failed before, to do, or cannot be built here because its model or data are not on
this machine. What is on a hub is not fetched for that: offline is set first. Nothing is written,
but that the hash of a model that is here is remembered.
"""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evals.experiments import PARTS, Experiment, named_in
from evals.names import ConfigError
from evals.record import FINISHED

if TYPE_CHECKING:
    from evals.cells import Cell

FLAG = "job.dry_run"
STATES = ("done", "to do", "failed before", "cannot run here")
WIDTH = 100


def asked(words: Sequence[str]) -> bool:
    """Tell whether a command's overrides ask for a listing; the last word on it counts."""
    values = [value for name, _, value in map(_parted, words) if name == FLAG]
    return bool(values) and values[-1].lower() == "true"


def _parted(word: str) -> tuple[str, str, str]:
    """Return name, ``=`` and value of an override."""
    return word.partition("=")


def check(flags: Sequence[bool]) -> None:
    """Refuse jobs that would run although their config asks for a listing: ConfigError."""
    if any(flags):
        raise ConfigError(f"{FLAG}=true: is for a whole command. Write it there, as one value.")


def show(words: Sequence[str], root: Path) -> str:
    """Return the listing of a command's overrides, as a person reads it.

    Raises what composing raises for words that cannot be used.
    """
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    from evals.cells import cells  # late: what it loads reads the two variables

    own = [word for word in words if _parted(word)[0] != FLAG]
    return listing(cells(own, root), named_in(own))


def state(cell: Cell) -> str:
    """Return which of STATES a job is in."""
    if cell.record is not None:
        return STATES[0] if cell.record["status"] == FINISHED else STATES[2]
    return STATES[3] if cell.problem else STATES[1]


def listing(found: Sequence[Cell], experiment: Experiment | None = None) -> str:
    """Return one line a job (state, key, name), the reasons once each, and the counts."""
    reasons: dict[str, int] = {}
    lines = []
    for cell in found:
        where = state(cell)
        mark = ""
        if reason := _reason(cell):
            mark = f" [{reasons.setdefault(reason, len(reasons) + 1)}]"
        lines.append(f"{where + mark:<20} {(cell.key or '-')[:8]:<8}  {cell.name}")
    counts = Counter(state(cell) for cell in found)
    total = ", ".join(f"{counts[name]} {name}" for name in STATES if counts[name])
    notes = [_wrapped(f"[{number}] ", reason) for reason, number in reasons.items()]
    closing = [f"{len(found)} jobs: {total}. Nothing was computed or downloaded."]
    if counts[STATES[3]]:
        closing.append("What is on a hub is fetched by the run itself, where there is a network.")
    parts = [_about(experiment), *lines, "", *notes, *closing]
    return "\n".join(part for part in parts if part is not None) + "\n"


def _reason(cell: Cell) -> str:
    """Return why a job failed or cannot be built, in one line; empty where it did neither."""
    if cell.record is None:
        return " ".join((cell.problem or "").split())
    if cell.record["status"] == FINISHED:
        return ""
    error = cell.record.get("error") or {}
    return " ".join(f"{error.get('type') or 'Error'}: {error.get('message') or ''}".split())


def _about(experiment: Experiment | None) -> str | None:
    """Return what an experiment's header says, a paragraph each."""
    if experiment is None:
        return None
    parts = [(part, getattr(experiment, part)) for part in PARTS]
    told = [_wrapped(f"{part.capitalize() + ':':<10}", text) for part, text in parts if text]
    return "\n".join(told) + "\n" if told else None


def _wrapped(first: str, text: str) -> str:
    """Return ``text`` behind ``first``, wrapped under itself."""
    lines = textwrap.wrap(text, WIDTH - len(first), break_long_words=False, break_on_hyphens=False)
    return first + ("\n" + " " * len(first)).join(lines)
