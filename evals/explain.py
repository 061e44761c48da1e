"""What a cell of a table is: its numbers, where they come from, and the command that remakes it.

    python scripts/explain.py WHAT [WORDS]

WHAT is a cell's name or parts of it, or the beginning of a key or of an MLflow run id. WORDS are
those of run.py: the cells of that command, what has not been run too; without them, all records.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals import record as store

Record = dict[str, Any]

_WORD = re.compile(r"[+~]{0,2}[\w./@]+=")
"""A word of run.py; the names of cells hold such words in brackets only."""
_KEY = re.compile(r"[0-9a-f]{4,64}")
_SHOWN = 40


@dataclass(frozen=True)
class Known:
    """A cell by its name; ``words`` are None where a record does not say how it was made."""

    name: str
    key: str | None
    record: Record | None
    words: list[str] | None
    problem: str | None = None


def of_command(words: list[str], root: Path) -> list[Known]:
    """Return the cells of a command. ConfigError where it cannot be used."""
    from evals.cells import cells

    return [Known(c.name, c.key, c.record, c.words, c.problem) for c in cells(words, root)]


def of_root(root: Path) -> list[Known]:
    """Return all records of a results root, named by what varies among them."""
    from evals.cell_names import places

    records = list(store.records(root))
    named = zip(records, places([record["config"] for record in records]), strict=True)
    return [Known(p.name, record["key"], record, record.get("words")) for record, p in named]


def matches(what: str, known: Sequence[Known]) -> list[Known]:
    """Return the cells that ``what`` may mean: its name, its key or run id, else parts of it."""
    if exact := [cell for cell in known if what in (cell.name, cell.key)]:
        return exact
    if _KEY.fullmatch(what) and (found := [cell for cell in known if _begins(cell, what)]):
        return found
    parts = what.lower().replace("·", " ").split()
    return [cell for cell in known if all(part in cell.name.lower() for part in parts)]


def _begins(cell: Known, what: str) -> bool:
    """Tell whether a cell's key or run id begins with ``what``."""
    run = (cell.record or {}).get("mlflow_run_id") or ""
    return (cell.key or "").startswith(what) or run.startswith(what)


def answer(what: str, known: Sequence[Known]) -> tuple[str, bool]:
    """Return what to print, and whether ``what`` is one cell."""
    found = matches(what, known)
    if len(found) == 1:
        return explained(found[0]), True
    if found:
        heading = f"{what!r} is {len(found)} cells:" if what else f"{len(found)} cells:"
        return _listing(heading, found), False
    near = difflib.get_close_matches(what, [cell.name for cell in known], n=5, cutoff=0.2)
    if not near:
        return f"{what!r}: there is no record here. Run something, or set GEAR_MLRUNS.\n", False
    heading = f"{what!r}: there is no such cell. The nearest of {len(known)}:"
    return _listing(heading, [next(c for c in known if c.name == name) for name in near]), False


def _listing(heading: str, found: Sequence[Known]) -> str:
    """Return cells by key and name, as many as can be read."""
    lines = [f"  {(cell.key or '-')[:8]:<8}  {cell.name}" for cell in found[:_SHOWN]]
    more = len(found) - _SHOWN
    lines += [f"  and {more} more: say more of the name"] if more > 0 else []
    return "\n".join([heading, *lines]) + "\n"


def explained(cell: Known) -> str:
    """Return all that is known of a cell, a line each."""
    told = [] if cell.record is None else _told(cell.record)
    if cell.record is None:
        told = [("status", cell.problem or "not run yet")]
    if cell.key:
        told += [("key", cell.key), ("record", f"records/{cell.key} in the results root")]
    words = (cell.record or {}).get("words", cell.words)
    if words is None:
        told.append(("again", "its record is older than the words it would be made with"))
    else:
        told.append(("again", shlex.join(["python", "run.py", *words])))
    if cell.record and words is not None:
        told.append(("compare", f"python scripts/reproduce.py {cell.record['key'][:12]}"))
    return "\n".join([cell.name, *(f"  {name + ':':<11} {text}" for name, text in told)]) + "\n"


def _told(record: Record) -> list[tuple[str, str]]:
    """Return what a record says."""
    from evals.report import reason
    from evals.table_notes import commit, data, walk

    config, environment = record["config"], record["environment"]
    weights = f"{config['model']['name']} {config['model']['weight_hash'][:8]}"
    versions = environment.get("versions", {})
    packages = ", ".join(f"{n} {versions[n]}" for n in ("mlx", "mlx-lm") if n in versions)
    told = [("status", record["status"])]
    if record.get("error"):
        told.append(("error", reason(record["error"])))
    guards = ", ".join(f"{name} {state}" for name, state in record["guards"].items())
    return [
        *told,
        *_numbers(record),
        *([("guards", guards)] if guards else []),
        ("protocol", f"{config['protocol']}; {walk(config)}; seed {config['seed']}"),
        ("data", data(record)),
        ("model", f"{weights}; {config['backend']} {config['dtype']}"),
        ("commit", commit(environment.get("git"))),
        ("measured", f"{record['finished']}, python {environment['python']} {packages}".strip()),
        ("MLflow run", record["mlflow_run_id"] or "none recorded"),
    ]


def _numbers(record: Record) -> list[tuple[str, str]]:
    """Return what was measured, as tables show it, and its bytes; nothing of a failed job."""
    from evals.columns import cells, frame, size

    metrics = record["metrics"]
    if "kv/stored_bytes" not in metrics:
        return []
    headings, row = cells(frame([record]))
    apart = ("method", "KV size %", "stored", "accounted", "status", "key")
    shown = [(h, t) for h, t in zip(headings, row, strict=True) if h not in apart and t != "-"]
    stored, accounted, fp16 = (size(metrics.get(f"kv/{k}_bytes")) for k in _KINDS)
    text = f"{stored} stored, {accounted} accounted, {size(metrics.get('mem/peak_bytes'))} peak"
    return [*shown, ("bytes", f"{text}; {metrics['kv/size_pct']:.1f}% of fp16's {fp16}")]


_KINDS = ("stored", "accounted", "fp16")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0 for one cell, 1 for several or none, 2 for wrong words."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or {"-h", "--help"} & set(argv):
        print((__doc__ or "").strip())
        return 0 if argv else 2
    # before anything that reads them is loaded: an answer never waits for a network
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    from evals.cells import typed

    root = store.results_root()
    try:
        words = typed(argv)
        what = " ".join(word for word in words if not _WORD.match(word))
        words = [word for word in words if _WORD.match(word)]
        text, found = answer(what, of_command(words, root) if words else of_root(root))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.write(text)
    return int(not found)
