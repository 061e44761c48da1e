"""What a run leaves: one table, a JSON file, a Markdown file. None of it needs veloxquant-mlx."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from comparison.found import Found
from comparison.notes import DENSE, NOT_THEIRS, WHY

WIDTH = 150
COLUMNS = ("data", "method", "setting", "K error", "theirs", "V error", "theirs",
           "K bits", "claimed", "V bits", "claimed", "held", "theirs")  # fmt: skip
LEGEND = (
    "Error: ‖X - X'‖_F / ‖X‖_F over all heads. Bits an element: ours by the closed form, theirs as "
    "its object claims; held: all arrays of the object, over K and V (the sides it has). fp16: 16."
)


@dataclass(frozen=True)
class Row:
    """One pair on one kind of data. A side that could not run has its error's text instead."""

    data: str
    method: str
    setting: str
    ours: Found | str
    theirs: Found | str


def cells(row: Row) -> list[str]:
    """Return the text of a row, in the order of COLUMNS."""
    shown: list[list[str]] = []
    for found in (row.ours, row.theirs):
        if isinstance(found, str):
            shown.append([found, *[""] * 4])
            continue
        errors = [_number(x, 4) for x in (found.k_error, found.v_error)]
        shown.append([*errors, *(_number(x, 2) for x in (found.k_bits, found.v_bits)),
                      _number(found.held_bits, 2)])  # fmt: skip
    both = [text for pair in zip(*shown, strict=True) for text in pair]
    return [row.data, row.method, row.setting, *both]


def _number(value: float | None, places: int) -> str:
    """Return a number's text, "-" for a side that there is not."""
    return "-" if value is None else f"{value:.{places}f}"


def show(rows: Sequence[Row]) -> None:
    """Print the table, and why the methods in it differ."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), caption=LEGEND)
    for place, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if place < 3 else "right", no_wrap=place < 3)
    for row in rows:
        table.add_row(*cells(row))
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
    for name, text in reasons(rows).items():
        console.print(f"{name}: {text}", highlight=False, markup=False)


def reasons(rows: Sequence[Row]) -> dict[str, str]:
    """Return the notes of the methods in ``rows``, that of all of them first."""
    return {"all": DENSE} | {row.method: WHY[row.method] for row in rows}


def as_json(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Return the rows with what they depend on and the notes."""
    whole = {"environment": dict(facts), "rows": [asdict(row) for row in rows],
             "why": reasons(rows), "not_compared": NOT_THEIRS}  # fmt: skip
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def as_markdown(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Return the same as Markdown."""
    lines = [list(COLUMNS), ["---"] * 3 + ["---:"] * (len(COLUMNS) - 3), *map(cells, rows)]
    table = "\n".join("| " + " | ".join(_safe(text) for text in line) + " |" for line in lines)
    known = ", ".join(f"{name} {value}" for name, value in facts.items())
    notes = "\n".join(f"- **{name}**: {text}" for name, text in reasons(rows).items())
    rest = "\n".join(f"- {name}: {text}" for name, text in NOT_THEIRS.items())
    return (
        f"# This package and veloxquant-mlx\n\n{known}\n\n{table}\n\n{LEGEND}\n\n"
        f"## Why they differ\n\n{notes}\n\n## Not compared\n\n{rest}\n"
    )


def _safe(text: str) -> str:
    """Return text that cannot end a cell."""
    return text.replace("|", "/").replace("\n", " ")
