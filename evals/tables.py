"""A command's table in the shape of a paper: methods by (model x task), made of its cells.

:func:`table` shapes the lines of evals/table_cells.py into rows and columns of entries, which
evals/table_formats.py writes out. Records are the only source of numbers; what papers report stands
beside them and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

from evals import published
from evals.cells import Cell
from evals.columns import interval, marks, missing
from evals.record import FAILED, FINISHED
from evals.table_cells import COLUMN, frame, lines

if TYPE_CHECKING:
    import pandas as pd

Line = dict[str, Any]
Column = tuple[str, str, str, str]
"""Model, dataset, protocol (empty where its dataset has one), metric."""

SIZE: Column = ("", "", "", "KV size %")
AVERAGE: Column = ("", "", "", "average")
NOT_HERE, DAGGER, PILCROW = "—", "‡", "¶"
"""A cell without a record, a change that is significant, a value reported for another model."""


@dataclass(frozen=True)
class Entry:
    """What stands in one place of a table: lines of text, and the cell they come from."""

    lines: tuple[str, ...]
    bold: bool = False
    key: str | None = None
    name: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of entries, KV size first."""

    columns: list[Column]
    rows: list[tuple[str, list[Entry]]]
    cells: list[Cell]
    data: pd.DataFrame
    """Its numbers (:func:`evals.table_cells.frame`)."""


def table(cells: Sequence[Cell]) -> Table:
    """Return the table of a command's cells (at least one); fp16 first, else in their order."""
    data = frame(cells)
    every = lines(data)
    columns = list(dict.fromkeys(map(_column, every)))
    averages = _averages(data, columns)
    rows = []
    for method in dict.fromkeys(line["method"] for line in sorted(every, key=_exact_first)):
        own = [line for line in every if line["method"] == method]
        at = {_column(line): line for line in own}
        entries = [_size(own, columns), *(_entry(at.get(column)) for column in columns)]
        rows.append((method + _marks(own), entries + averages.get(method, [])))
    last = [AVERAGE] if averages else []
    return Table([SIZE, *columns, *last], rows, list(cells), data)


def _column(line: Line) -> Column:
    """Return the column of a line."""
    return line["model"], line["dataset"], line["protocol"], line["metric"]


def _exact_first(line: Line) -> bool:
    """Return what sorts fp16 first and leaves the others as they are."""
    return not line["exact"]


def _marks(own: Sequence[Line]) -> str:
    """Return the marks behind a method's name."""
    names = ("accounting_only", "allow_uncompressed")
    return marks({name: any(line[name] for line in own) for name in names})


def _pairs(columns: Sequence[Column]) -> set[tuple[str, str]]:
    """Return the models and datasets of a table."""
    return {(model, dataset) for model, dataset, _, _ in columns}


def _size(own: Sequence[Line], columns: Sequence[Column]) -> Entry:
    """Return a row's KV size: the mean over its cells that have one."""
    sizes = {line["name"]: line["kv_size_pct"] for line in own if line["kv_size_pct"] is not None}
    theirs = published.over_all(own[0]["settings"], _pairs(columns), "kv_size_pct")
    text = f"{mean(sizes.values()):.1f}" if sizes else NOT_HERE
    return Entry((text, *_reported(theirs and theirs.value, theirs and theirs.differs, ".1f")))


def _entry(line: Line | None) -> Entry:
    """Return what a table shows of one measure; nothing where its method has no such job."""
    if line is None:
        return Entry(("",))
    percent = line["percent"]
    scale, form = (100, ".1f") if percent else (1, line["form"])
    names = ("value", "low", "high", "delta", "reported")
    row = {name: None if line[name] is None else scale * line[name] for name in names}
    if line["status"] == FINISHED:
        shown = [
            interval({**row, "value_low": row["low"], "value_high": row["high"]}, "value", form)
        ]
    else:
        shown = ["failed" if line["status"] == FAILED else NOT_HERE]
    if row["delta"] is not None:
        name, form = ("Δ", "+.1f") if percent else ("ΔNLL", "+.4f")
        name = name if percent or line["metric"] == "ppl" else "Δ"
        shown.append(f"{name} {row['delta']:{form}}{DAGGER if line['significant'] else ''}")
    shown += _reported(row["reported"], line["reported_differs"])
    return Entry(tuple(shown), bool(line["best"]), line["key"], line["name"])


def _reported(value: float | None, differs: str | None, form: str = ".2f") -> list[str]:
    """Return the line of a value that a paper reports, none without one."""
    return [] if value is None else [f"reported {value:{form}}{PILCROW if differs else ''}"]


def _averages(data: Any, columns: Sequence[Column]) -> dict[str, list[Entry]]:
    """Return each row's mean of its scores in percent, where there are several tasks.

    A row with a score that is missing or failed has none.
    """
    scores = data[data["percent"]]
    if len(scores[COLUMN].drop_duplicates()) < 2:
        return {}
    # a method that has no such job lacks the score as well, so the pivot fills all places
    means, changes = (
        scores.astype({what: float})
        .pivot(index="method", columns=COLUMN, values=what)
        .mean(axis=1, skipna=False)
        for what in ("value", "delta")
    )
    exact = set(data[data["exact"]]["method"])
    best = means.drop(exact, errors="ignore").max()
    found = {}
    for line in lines(data.drop_duplicates("method")):
        method = line["method"]
        value, delta = means.get(method), changes.get(method)
        shown = [NOT_HERE if missing(value) else f"{100 * value:.1f}"]
        shown += [] if missing(delta) else [f"Δ {100 * delta:+.1f}"]
        theirs = published.over_all(line["settings"], _pairs(columns))
        shown += _reported(theirs and theirs.value, theirs and theirs.differs)
        found[method] = [Entry(tuple(shown), method not in exact and value == best)]
    return found
