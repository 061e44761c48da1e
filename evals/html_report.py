"""A sweep as one HTML file: question, command, table, figures, layers, failures, how to repeat it.

The file needs nothing beside it: no network, no script, figures and their numbers inside. Every
text of a record is escaped, and a content policy forbids whatever might get through. Equal records
give the same bytes; run ids, which depend on the store, are left out.
"""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from evals import columns, plots, report
from evals.drawing import Drawing, Samples, image, numbers
from evals.experiments import Experiment
from evals.figures_layers import layer_rows
from evals.html_provenance import environment, guards, reproduce, table
from evals.record import FAILED
from evals.settings import labels

Record = dict[str, Any]

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 78em; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-size: .87em; margin: .7em 0; }
th, td { padding: .25em .7em; border-bottom: 1px solid #e2e2e2; text-align: right; }
th:first-child, td:first-child, .text th, .text td { text-align: left; }
td { overflow-wrap: anywhere; } th { border-bottom: 2px solid #888; }
.wide { overflow-x: auto; } .failed { color: #a33a00; font-weight: 600; }
pre { background: #f4f4f4; padding: .7em; white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: 1.2em 0; } figure img { max-width: 100%; } figcaption, .note { color: #555; }
dt { font-weight: 600; } dd { margin: 0 0 .5em 1.5em; } summary { cursor: pointer; }
@media print { details { display: block; } }
"""


def html(
    records: Sequence[Record],
    samples: Samples,
    argv: Sequence[str] | None,
    experiment: Experiment | None,
    figures: Mapping[str, Drawing] | None = None,
) -> str:
    """Return the report of a sweep.

    ``samples`` gives the samples of a record's key, ``argv`` is what followed run.py on the command
    line (None: not known), ``experiment`` the recorded question (None: none was asked by name),
    ``figures`` those of plots.of_sweep where they are drawn already.
    """
    title = _title(records, experiment)
    drawn = plots.of_sweep(records, samples) if figures is None else figures
    sections = [
        ("Question", _question(experiment)),
        ("Command", _command(argv)),
        ("Results", _results(records)),
        ("Figures", _figures(drawn)),
        ("Failures", _failures(records)),
        ("By layer", _layers(records, samples)),
        ("Guards", guards(records)),
        ("Where it was measured", environment(records)),
        ("How to reproduce", reproduce(records, argv)),
    ]
    body = "\n".join(f"<h2>{name}</h2>\n{text}" for name, text in sections if text)
    text = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )
    return text.encode("utf-8", "replace").decode()  # half a letter of a cut log cannot be written


def _title(records: Sequence[Record], experiment: Experiment | None) -> str:
    """Return what the sweep is, in a line."""
    names = [
        ", ".join(dict.fromkeys(record["config"][group]["name"] for record in records))
        for group in ("model", "dataset", "eval")
    ]
    jobs = f"{len(records)} job{'s' if len(records) != 1 else ''}"
    return " · ".join([*([experiment.name] if experiment else []), *names, jobs])


def _question(experiment: Experiment | None) -> str:
    """Return the experiment's question, what it takes, what was expected, the decision rule."""
    if experiment is None:
        return ""
    parts = {
        "Question": experiment.question,
        "Decision rule": experiment.decision,
        "Expected": experiment.expected,
        "Takes": experiment.takes,
    }
    items = [f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in parts.items() if text]
    return f"<dl>{''.join(items)}</dl>"


def _command(argv: Sequence[str] | None) -> str:
    """Return the command as it was typed."""
    if argv is None:
        return '<p class="note">Not known: these records are of no recorded sweep.</p>'
    return f"<pre>{escape(shlex.join(['python', 'run.py', *argv]))}</pre>"


def _results(records: Sequence[Record]) -> str:
    """Return the table with its intervals and the notes below it."""
    found = columns.frame(records)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in columns.notes(found))
    explained = '<p class="note">value [low, high] is an interval; - is not measured.</p>'
    return table(columns.cells(found)) + explained + notes


def _figures(figures: Mapping[str, Drawing]) -> str:
    """Return the figures as images in the file, each with its numbers."""
    return "\n".join(_figure(name, drawing) for name, drawing in figures.items())


def _figure(name: str, drawing: Drawing) -> str:
    """Return one figure with its caption and a link that saves its numbers."""
    picture = b64encode(image(drawing, "png")).decode()
    data = b64encode(numbers(drawing).encode()).decode()
    caption = escape(plots.CAPTIONS[name])
    return (
        f'<figure id="{name}"><img alt="{caption}" src="data:image/png;base64,{picture}">'
        f'<figcaption>{caption} <a download="{name}.csv" href="data:text/csv;base64,{data}">'
        f"numbers (CSV)</a></figcaption></figure>"
    )


def _failures(records: Sequence[Record]) -> str:
    """Return which jobs failed and why, with the end of their logs."""
    failed = [record for record in records if record["status"] == FAILED]
    items: list[str] = []
    for record, (name, reason) in zip(failed, report.failures(records), strict=True):
        log = str((record.get("error") or {}).get("log_tail") or "").strip()
        detail = f"<details><summary>log</summary><pre>{escape(log)}</pre></details>" if log else ""
        head = f'<span class="failed">{escape(name)}</span> ({record["key"][:8]})'
        items.append(f"<li>{head}: {escape(reason)}{detail}</li>")
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _layers(records: Sequence[Record], samples: Samples) -> str:
    """Return a folded table by layer of each job that has one."""
    names = labels([record["config"] for record in records])
    parts: list[str] = []
    for record, name in zip(records, names, strict=True):
        # only these samples hold errors by layer; the others' are not read again
        has_errors = record["config"]["eval"].get("task") == "reconstruction"
        if rows := layer_rows(record, samples(record["key"]) if has_errors else []):
            summary = f"<summary>{escape(name)} ({record['key'][:8]})</summary>"
            parts.append(f"<details>{summary}{table(_layer_cells(rows))}</details>")
    return "\n".join(parts)


def _layer_cells(rows: Iterable[Record]) -> list[list[str]]:
    """Return a job's layers as text, with the columns that were measured."""
    rows = list(rows)
    forms = {
        "layer": ("layer", "{:d}"),
        "stored_bytes": ("stored bytes", "{:,d}"),
        "fp16_bytes": ("fp16 bytes", "{:,d}"),
        "k_rel_err": ("K error", "{:.4f}"),
        "v_rel_err": ("V error", "{:.4f}"),
    }
    shown = [name for name in forms if any(row[name] is not None for row in rows)]
    body = [["-" if r[n] is None else forms[n][1].format(r[n]) for n in shown] for r in rows]
    return [[forms[name][0] for name in shown], *body]
