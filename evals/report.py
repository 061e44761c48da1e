"""Tables of a sweep: one frame of its records, and that frame on the terminal and in files.

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

from evals.settings import labels

if TYPE_CHECKING:
    import pandas as pd

    from evals.tracking import SweepView

Record = dict[str, Any]

COLUMNS = (
    "method", "kv_size_pct", "stored_bytes", "accounted_bytes",
    "ppl_token", "ppl_token_low", "ppl_token_high",
    "delta_nll", "delta_nll_low", "delta_nll_high", "kl_mean", "top1_flip_rate",
    "k_rel_err", "v_rel_err", "decode_tok_per_s", "status", "run_id",
    "model", "dataset", "eval", "accounting_only", "allow_uncompressed", "key",
)  # fmt: skip
"""Columns of :func:`frame`, always these in this order. Bytes, nats, fractions, percent of fp16."""

NOTES = {
    "*": "bytes are accounted for, not held: this method keeps its tensors dense",
    "†": "eval.allow_uncompressed=true: the compressed share may be too small to mean anything",
}
"""Marks behind a method's name, explained below every table that has them."""

_METRICS = {
    "kv_size_pct": "kv/size_pct",
    "stored_bytes": "kv/stored_bytes",
    "accounted_bytes": "kv/accounted_bytes",
    "delta_nll": "fidelity/delta_nll",
    "delta_nll_low": "fidelity/delta_nll_low",
    "delta_nll_high": "fidelity/delta_nll_high",
    "kl_mean": "fidelity/kl_mean",
    "top1_flip_rate": "fidelity/top1_flip_rate",
    "k_rel_err": "reconstruction/k_rel_err",
    "v_rel_err": "reconstruction/v_rel_err",
    "decode_tok_per_s": "speed/decode_tok_per_s",
}


def frame(records: Sequence[Record], view: SweepView | None = None) -> pd.DataFrame:
    """Return one row a record with :data:`COLUMNS`, the exact caches first, else in their order.

    A value that a record lacks is NaN. Run ids are those of ``view``: a record's own may be of a
    store that is gone, its key never is.
    """
    import pandas as pd  # here: half a second, and only a finished sweep needs it

    names = labels([record["config"] for record in records])
    rows = [_row(record, name, view) for record, name in zip(records, names, strict=True)]
    exact = [record["config"]["cache"]["name"] == "fp16" for record in records]
    order = sorted(range(len(rows)), key=lambda index: not exact[index])
    return pd.DataFrame([rows[index] for index in order], columns=list(COLUMNS))


def _row(record: Record, name: str, view: SweepView | None) -> dict[str, Any]:
    """Return the raw values of one record by column."""
    config, metrics = record["config"], record["metrics"]
    row = {column: metrics.get(metric) for column, metric in _METRICS.items()}
    perplexity = next((m for m in metrics if m.startswith("quality/ppl_token/")), "")
    row |= {f"ppl_token{end}": metrics.get(perplexity + end) for end in ("", "_low", "_high")}
    return row | {
        "method": name,
        "status": record["status"],
        "run_id": view.run_ids.get(record["key"]) if view else None,
        "model": config["model"]["name"],
        "dataset": config["dataset"]["name"],
        "eval": config["eval"]["name"],
        "accounting_only": bool(record.get("bytes", {}).get("accounting_only")),
        "allow_uncompressed": bool(config["eval"].get("allow_uncompressed")),
        "key": record["key"],
    }


def cells(table: pd.DataFrame) -> list[list[str]]:
    """Return a :func:`frame` as a person reads it: headings, then a row of text each; - is empty.

    Columns of reconstruction errors are there where there are any. The last column is the run, or
    the record's key where no run is known.
    """
    rows = table.to_dict("records")
    errors = any(not _missing(row["k_rel_err"]) for row in rows)
    run = "key" if all(_missing(row["run_id"]) for row in rows) else "run"
    return [
        ["method", "KV size %", "stored", "accounted", "ppl", "ΔNLL", "KL", "flips"]
        + (["K error", "V error"] if errors else [])
        + ["tok/s", "status", run],
        *(_cells(row, errors) for row in rows),
    ]


def _cells(row: dict[str, Any], errors: bool) -> list[str]:
    """Return one row's text."""
    return [
        row["method"] + _marks(row),
        _number(row["kv_size_pct"], ".1f"),
        _size(row["stored_bytes"]),
        _size(row["accounted_bytes"]),
        _interval(row, "ppl_token", ".2f"),
        _interval(row, "delta_nll", "+.4f"),
        _number(row["kl_mean"], ".4f"),
        _number(row["top1_flip_rate"], ".1%"),
        *([_number(row[side], ".4f") for side in ("k_rel_err", "v_rel_err")] if errors else []),
        _number(row["decode_tok_per_s"], ".1f"),
        row["status"],
        (row["key"] if _missing(row["run_id"]) else row["run_id"])[:8],
    ]


def _marks(row: dict[str, Any]) -> str:
    """Return the marks of a row, in the order of :data:`NOTES`."""
    return ("*" if row["accounting_only"] else "") + ("†" if row["allow_uncompressed"] else "")


def _missing(value: Any) -> bool:
    """Tell whether a cell is empty (pandas turns None into NaN in columns of numbers)."""
    return value is None or value != value


def _number(value: Any, form: str) -> str:
    """Return a number as text."""
    return "-" if _missing(value) else format(value, form)


def _interval(row: dict[str, Any], column: str, form: str) -> str:
    """Return ``value [low, high]``, or the value alone where there is no interval."""
    value, low, high = (row[f"{column}{end}"] for end in ("", "_low", "_high"))
    if _missing(low) or _missing(high):
        return _number(value, form)
    return f"{_number(value, form)} [{_number(low, form)}, {_number(high, form)}]"


def _size(value: Any) -> str:
    """Return bytes in the unit that reads best."""
    if _missing(value):
        return "-"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def notes(table: pd.DataFrame) -> list[str]:
    """Return the explanations of the marks that the table has."""
    seen = "".join(_marks(row) for row in table.to_dict("records"))
    return [f"{mark} {text}" for mark, text in NOTES.items() if mark in seen]


def failures(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return (method, reason) of every failed record: type, signal, message, last log line."""
    names = labels([record["config"] for record in records])
    return [
        (name, _reason(record.get("error") or {}))
        for record, name in zip(records, names, strict=True)
        if record["status"] == "FAILED"
    ]


def _reason(error: dict[str, Any]) -> str:
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
    lines = [_markdown_row(row) for row in (headings, right, *rows)]
    lines += [f"\n{note}" for note in notes(table)]
    failed = failures(records)
    lines += ["\nFailed:\n"] if failed else []
    lines += [f"- {name}: {reason}" for name, reason in failed]
    return "\n".join(lines) + "\n"


def _markdown_row(row: Sequence[str]) -> str:
    """Return one table row; a bar inside a cell would end it."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def latex(records: Sequence[Record], view: SweepView | None = None) -> str:
    """Return the table as a booktabs ``tabular`` that needs no other package; notes as comments."""
    table = frame(records, view)
    rows = cells(table)
    body = [" & ".join(map(_latex_text, row)) + r" \\" for row in rows]
    return "\n".join([
        r"\begin{tabular}{l" + "r" * (len(rows[0]) - 3) + "ll}",
        r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule",
        r"\end{tabular}",
        *(f"% {note}" for note in notes(table)),
        "",
    ])  # fmt: skip


def _latex_text(text: str) -> str:
    """Return ``text`` with what LaTeX reads as commands written out."""
    special = {c: f"\\{c}" for c in "&%$#_{}"} | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "Δ": r"$\Delta$",
        "†": r"$\dagger$",
    }
    return "".join(special.get(character, character) for character in text)


def csv(records: Sequence[Record], view: SweepView | None = None) -> str:
    """Return the raw numbers of :func:`frame` as CSV with a header line."""
    return frame(records, view).to_csv(index=False, lineterminator="\n")


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
