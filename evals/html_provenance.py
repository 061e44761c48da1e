"""The parts of a report that say how far it can be trusted: guards, environment, how to repeat it.

All text is escaped here; see :mod:`evals.html_report` for the whole.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from evals.settings import labels

Record = dict[str, Any]


def table(rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """Return rows of cells, the first of them headings, as an HTML table of numbers or of text."""
    head, *body = rows
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
    lines += [f"<tr>{''.join(map(_cell, row))}</tr>" for row in body]
    body_text = "\n".join(lines)
    return f'<div class="wide"><table class="{kind}">\n{body_text}\n</table></div>'


def _cell(text: str) -> str:
    """Return one cell; what failed stands out."""
    mark = ' class="failed"' if text.lower().startswith("failed") else ""
    return f"<td{mark}>{escape(text)}</td>"


def guards(records: Sequence[Record]) -> str:
    """Return what each guard said of each job, empty where no job came to have any."""
    names = list(dict.fromkeys(name for record in records for name in record["guards"]))
    if not names:
        return ""
    jobs = labels([record["config"] for record in records])
    rows = [
        [job, *(str(record["guards"].get(name, "-")).replace("_", " ") for name in names)]
        for job, record in zip(jobs, records, strict=True)
    ]
    return table([["method", *names], *rows], "text")


def environment(records: Sequence[Record]) -> str:
    """Return protocol, data, versions, machine and commit: a row each, by job where they differ."""
    found = [_facts(record) for record in records]
    rows = [["what", "value"]]
    for name in dict.fromkeys(name for facts in found for name in facts):
        values: dict[str, list[str]] = {}
        for facts, record in zip(found, records, strict=True):
            values.setdefault(facts.get(name, "-"), []).append(record["key"][:8])
        if len(values) == 1:
            rows.append([name, next(iter(values))])
        else:
            rows += [[name, f"{value} ({', '.join(keys)})"] for value, keys in values.items()]
    return table(rows, "text")


def _facts(record: Record) -> dict[str, str]:
    """Return what a record says of where it was measured, by name."""
    config, measured = record["config"], record["environment"]
    git = measured.get("git")
    dirty = " with uncommitted changes" if git and git.get("dirty") else ""
    facts = {
        "protocol": config.get("protocol"),
        "model weights (sha256)": config["model"].get("weight_hash"),
        "data (sha256)": config["dataset"].get("content_hash"),
        "seed": config.get("seed"),
        "backend": config.get("backend"),
        "compute dtype": config.get("dtype"),
        "commit": f"{git['commit']}{dirty}" if git else "not in a git checkout",
    }
    flat: dict[str, Any] = {}
    for name, value in measured.items():
        if name != "git":
            flat |= value if isinstance(value, dict) else {name: value}
    facts |= flat
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in facts.items()
        if value is not None
    }


def reproduce(records: Sequence[Record], argv: Sequence[str] | None) -> str:
    """Return the command of the whole and, for each job, what re-runs and compares it."""
    again = "" if argv is None else (
        "<p>All of it (records that exist are used as they are):</p>"
        f"<pre>{escape(shlex.join(['python', 'run.py', *argv]))}</pre>"
    )  # fmt: skip
    names = labels([record["config"] for record in records])
    rows = [["method", "re-run and compare", "run alone"]]
    for record, name in zip(records, names, strict=True):
        words = record.get("words")
        alone = shlex.join(["python", "run.py", *words]) if words else "-"
        rows.append([name, f"python scripts/reproduce.py {record['key']}", alone])
    rows = rows if any(row[2] != "-" for row in rows[1:]) else [row[:2] for row in rows]
    return again + table(rows, "text")
