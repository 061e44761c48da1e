"""Tables of a sweep: the frame of its records (evals/columns.py) on the terminal and in files.

Records are the only source. Markdown, LaTeX and the terminal show the same cells; CSV holds the raw
numbers (bytes, nats, fractions), so that a figure can be made from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evals.columns import cells, frame, notes
from evals.settings import labels

if TYPE_CHECKING:
    import pandas as pd

    from evals.tracking import SweepView

Record = dict[str, Any]


def failures(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return (method, reason) of every failed record: type, signal, message, last log line."""
    names = labels([record["config"] for record in records])
    return [
        (name, reason(record.get("error") or {}))
        for record, name in zip(records, names, strict=True)
        if record["status"] == "FAILED"
    ]


def reason(error: dict[str, Any]) -> str:
    """Return why a job failed, in one line."""
    signal = f" ({error['signal']})" if error.get("signal") else ""
    message = " ".join(str(error.get("message") or "no message").split())
    log = [line.strip() for line in str(error.get("log_tail") or "").splitlines() if line.strip()]
    # a crash ends its log with one line of every loaded module
    last = f"; last log line: {shorten(log[-1], 160, placeholder=' …')}" if log else ""
    return f"{error.get('type') or 'Error'}{signal}: {message}{last}"


def markdown(records: Sequence[Record], view: SweepView | None = None) -> str:
    """Return the table, its notes and its failures as Markdown."""
    table = frame(records, view)
    headings, *rows = cells(table)
    right = ["---", *["---:"] * (len(headings) - 3), "---", "---"]
    lines = [markdown_row(row) for row in (headings, right, *rows)]
    lines += [f"\n{note}" for note in notes(table)]
    failed = failures(records)
    lines += ["\nFailed:\n"] if failed else []
    lines += [f"- {name}: {reason}" for name, reason in failed]
    return "\n".join(lines) + "\n"


def markdown_row(row: Sequence[str]) -> str:
    """Return one table row; a bar or a new line inside a cell would end it."""
    whole = (" ".join(cell.splitlines()) for cell in row)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in whole) + " |"


def latex(records: Sequence[Record], view: SweepView | None = None) -> str:
    """Return the table as a booktabs ``tabular`` that needs no other package; notes as comments."""
    table = frame(records, view)
    rows = cells(table)
    body = [" & ".join(map(latex_text, row)) + r" \\" for row in rows]
    return "\n".join([
        r"\begin{tabular}{l" + "r" * (len(rows[0]) - 3) + "ll}",
        r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule",
        r"\end{tabular}",
        *map(latex_comment, notes(table)),
        "",
    ])  # fmt: skip


def latex_text(text: str) -> str:
    """Return ``text`` with what LaTeX reads as commands written out."""
    special = {c: f"\\{c}" for c in "&%$#_{}"} | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "Δ": r"$\Delta$",
        "†": r"$\dagger$",
        "‡": r"$\ddagger$",
        "¶": r"\P{}",
        "·": r"$\cdot$",
        "—": "---",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
    }
    return "".join(special.get(character, character) for character in text)


def latex_comment(text: str) -> str:
    """Return ``text`` as a comment: in one line, as the next would be no comment."""
    return f"% {' '.join(text.split())}"


def csv(records: Sequence[Record], view: SweepView | None = None) -> str:
    """Return the raw numbers of :func:`frame` as CSV with a header line."""
    return plain_cells(frame(records, view)).to_csv(index=False, lineterminator="\n")


def plain_cells(data: pd.DataFrame) -> pd.DataFrame:
    """Return a table in which no text is a formula to a spreadsheet: an apostrophe goes before."""

    def plain(value: Any) -> Any:
        formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        return f"'{value}" if formula else value

    return data.map(plain)


def results_table(records: Sequence[Record], view: SweepView | None = None) -> Table:
    """Return the table for a terminal."""
    headings, *rows = cells(frame(records, view))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        number = 0 < index < len(headings) - 2
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        colour = "red" if row[-2] == "FAILED" else "green"
        table.add_row(*map(escape, row[:-2]), f"[{colour}]{row[-2]}[/]", escape(row[-1]))
    return table


def print_results(records: Sequence[Record], view: SweepView | None, console: Console) -> None:
    """Print the table, what failed and why, and how to open the runs.

    Piped output is the Markdown text: a table folded to a terminal's width cannot be read by tools.
    """
    if console.is_terminal:
        console.print(results_table(records, view))
        lines = notes(frame(records, view))
        lines += [f"FAILED {name}: {reason}" for name, reason in failures(records)]
    else:
        lines = [markdown(records, view)]
    if view is not None:
        lines.append(f"MLflow run {view.parent_run_id}; to look at it:\n  {view.ui_command}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
