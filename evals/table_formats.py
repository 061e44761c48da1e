"""A paper's table as text: Markdown, LaTeX, CSV, HTML. All show the same entries (evals/tables.py).

Markdown and LaTeX show each cell's key in short, CSV and HTML in full: ``scripts/explain.py KEY``
says what a cell is and how to make it again. CSV holds the raw numbers, a line for every cell and
measure.
"""

from __future__ import annotations

import html as markup
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import groupby

from evals.report import latex_comment, latex_text, markdown_row, plain_cells
from evals.table_notes import notes
from evals.tables import Column, Entry, Table

CSV_COLUMNS = (
    "name", "method", "model", "dataset", "protocol", "metric", "status",
    "value", "low", "high", "delta", "delta_low", "delta_high", "p_value", "significant", "best",
    "kv_size_pct", "items", "reported", "reported_by", "reported_model", "reported_differs",
    "accounting_only", "allow_uncompressed", "reason", "key", "run_id", "command",
)  # fmt: skip
"""Columns of the CSV, always these. Fractions of 1 and nats; ``kv_size_pct`` is in percent."""

_MINUS = re.compile(r"(?<![\w-])-(?=\d)")
_PAPER = (
    "\\documentclass{article}\n\\usepackage[a3paper,landscape,margin=15mm]{geometry}\n"
    "\\usepackage{booktabs}\n\\begin{document}\n\\noindent\n"
)
_STYLE = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:2em}table{border-collapse:collapse}"
    "th,td{padding:.3em .8em;text-align:right;vertical-align:top;border-bottom:1px solid #ccc}"
    "thead th{border-bottom:2px solid #333}th:first-child,td:first-child{text-align:left}"
    "td a{color:inherit;text-decoration:none}td small{color:#555}code{font-size:12px}"
)


def heading(column: Column, table: Table) -> str:
    """Return a column's heading in one line; a model that all share is in the notes."""
    model, *rest = column
    models = {name for name, *_ in table.columns if name}
    return " · ".join(filter(None, [model if len(models) > 1 else "", *rest]))


def _runs(table: Table) -> list[tuple[str, Entry]]:
    """Return (name, entry) of every cell that has a key, once each."""
    entries = [entry for _, row in table.rows for entry in row if entry.key]
    return list({entry.name: entry for entry in entries}.items())


def markdown(table: Table, command: Sequence[str]) -> str:
    """Return the table, its notes, and a list of every cell's key."""
    headings = ["method", *(heading(column, table) for column in table.columns)]

    def text(entry: Entry) -> str:
        first, *rest = entry.lines
        return "<br>".join([f"**{first}**" if entry.bold else first, *rest])

    lines = [
        markdown_row(headings),
        markdown_row(["---", *["---:"] * (len(headings) - 1)]),
        *(markdown_row([method, *map(text, row)]) for method, row in table.rows),
        "",
        *(f"- {_starless(note)}" for note in notes(table, command)),
    ]
    if runs := _runs(table):
        lines += ["", "Cells (`python scripts/explain.py KEY`):", ""]
        lines += [f"- {_starless(name)}: `{(entry.key or '')[:8]}`" for name, entry in runs]
    return "\n".join(lines) + "\n"


def _starless(text: str) -> str:
    """Return text of a list in which a star or a bar is only that."""
    return text.replace("*", "\\*").replace("_", "\\_").replace("|", "\\|").replace("<", "&lt;")


def latex(table: Table, command: Sequence[str], *, standalone: bool = False) -> str:
    """Return a booktabs ``tabular`` with its notes below, or a whole article that holds it.

    Keys are comments, a line each.
    """
    rows = [_latex_row(method, row) for method, row in table.rows]
    body = "\n\\addlinespace\n".join(rows)
    below = [latex_text(note) for note in notes(table, command)]
    lines = [
        *(latex_comment(f"{(entry.key or '')[:8]} {name}") for name, entry in _runs(table)),
        r"\begin{tabular}{l" + "r" * len(table.columns) + "}",
        r"\toprule", *_latex_heading(table), r"\midrule", body, r"\bottomrule",
        r"\end{tabular}",
        "",
        r"\medskip{\footnotesize\raggedright", *(rf"\noindent {note}\par" for note in below), "}",
        "",
    ]  # fmt: skip
    text = "\n".join(lines)
    return f"{_PAPER}{text}\\end{{document}}\n" if standalone else text


def _latex_heading(table: Table) -> list[str]:
    """Return the heading rows: models over their columns where there are several."""
    spans = _spans(table)
    single = len({model for model, _ in spans if model}) < 2
    names = [_stack([latex_text(part) for part in column[1:] if part]) for column in table.columns]
    last = " & ".join(["method", *names]) + r" \\"
    if single:
        return [last]
    over, rules, at = [""], [], 2
    for model, width in spans:
        over.append(rf"\multicolumn{{{width}}}{{c}}{{{latex_text(model)}}}")
        rules += [rf"\cmidrule(lr){{{at}-{at + width - 1}}}"] if model else []
        at += width
    return [" & ".join(over) + r" \\", "".join(rules), last]


def _spans(table: Table) -> list[tuple[str, int]]:
    """Return the models over the columns, each with the number of columns it spans."""
    runs = groupby(table.columns, key=lambda column: column[0])
    return [(model, len(list(run))) for model, run in runs]


def _stack(lines: Sequence[str]) -> str:
    """Return lines one below the other, the first on the row's own line."""
    if len(lines) == 1:
        return lines[0]
    return r"\begin{tabular}[t]{@{}r@{}}" + r" \\ ".join(lines) + r"\end{tabular}"


def _latex_row(method: str, row: Sequence[Entry]) -> str:
    """Return one row; an entry of several lines is a stack."""

    def text(entry: Entry) -> str:
        first, *rest = (_MINUS.sub("$-$", latex_text(line)) for line in entry.lines)
        return _stack([rf"\textbf{{{first}}}" if entry.bold else first, *rest])

    return " & ".join([latex_text(method), *map(text, row)]) + r" \\"


def csv(table: Table, command: Sequence[str]) -> str:
    """Return the raw numbers, a line for every cell and measure; ``command`` remakes a cell."""
    words = table.data["words"].map(lambda words: shlex.join(["python", "run.py", *words]))
    data = table.data.assign(command=words)
    data = plain_cells(data.loc[:, list(CSV_COLUMNS)])
    return data.to_csv(index=False, lineterminator="\n")


def html(table: Table, command: Sequence[str]) -> str:
    """Return one page that needs no other file; every cell links to its run below the table."""
    title = markup.escape(shlex.join(command))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>'
        f"\n<style>{_STYLE}</style>\n</head>\n<body>\n{fragment(table, command)}</body>\n</html>\n"
    )


def fragment(table: Table, command: Sequence[str]) -> str:
    """Return the table, its notes and its runs as HTML for the body of a page."""
    models = len({model for model, *_ in table.columns if model}) > 1
    spans = "".join(f'<th colspan="{n}">{markup.escape(model)}</th>' for model, n in _spans(table))
    names = [" · ".join(filter(None, column[1:])) for column in table.columns]
    last = "".join(f"<th>{markup.escape(name)}</th>" for name in ["method", *names])
    head = [f"<tr><th></th>{spans}</tr>"] * models + [f"<tr>{last}</tr>"]
    body = [
        f"<tr><td>{markup.escape(method)}</td>{''.join(map(_html_entry, row))}</tr>"
        for method, row in table.rows
    ]
    words = {cell.key: cell.words for cell in table.cells}
    runs = [_html_run(name, entry.key or "", words[entry.key]) for name, entry in _runs(table)]
    return "\n".join([
        "<table>", "<thead>", *head, "</thead>", "<tbody>", *body, "</tbody>", "</table>",
        *_html_list("Notes", notes(table, command), markup.escape),
        *(["<h2>Cells</h2>", "<ul>", *runs, "</ul>"] if runs else []),
        "",
    ])  # fmt: skip


def _html_entry(entry: Entry) -> str:
    """Return one place of the table; the key is its title and where its link leads."""
    first, *rest = map(markup.escape, entry.lines)
    first = f"<b>{first}</b>" if entry.bold else first
    if entry.key is None:
        shown, title = first, ""
    else:
        shown = f'<a href="#run-{entry.key}">{first}</a>'
        title = f' title="{markup.escape(entry.name)} · {entry.key}"'
    return f"<td{title}>{shown}{''.join(f'<br><small>{line}</small>' for line in rest)}</td>"


def _html_list(heading: str, texts: Sequence[str], write: Callable[[str], str]) -> list[str]:
    """Return a heading and a list."""
    return [f"<h2>{heading}</h2>", "<ul>", *(f"<li>{write(text)}</li>" for text in texts), "</ul>"]


def _html_run(name: str, key: str, words: Sequence[str]) -> str:
    """Return the line that a cell links to: its name, its key and the command that remakes it."""
    command = markup.escape(shlex.join(["python", "run.py", *words]))
    return (
        f'<li id="run-{key}">{markup.escape(name)}<br><code>{key}</code><br>'
        f"<code>{command}</code></li>"
    )


FORMATS: dict[str, Callable[[Table, Sequence[str]], str]] = {
    "md": markdown,
    "latex": latex,
    "csv": csv,
    "html": html,
}
