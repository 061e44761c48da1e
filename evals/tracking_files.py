"""The files of a run in MLflow, and the tags that tell its pages about them. No MLflow here.

The same records give the same files, so a store that is rebuilt holds the same bytes. A table is
JSON as ``MlflowClient.log_table`` writes it, and the run's tag names it as that call would; writing
it with the other files saves the call's four round trips a table.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from evals import report
from evals.columns import cells, frame, notes
from evals.drawing import image, numbers
from evals.experiments import named_in
from evals.figures_layers import layer_rows
from evals.html_provenance import table as html_table
from evals.html_report import html
from evals.plots import of_job, of_sweep, save
from evals.record import LOG, SAMPLES, read_samples, record_dir
from evals.sweeps import Sweep

Record = dict[str, Any]
Texts = dict[str, str]

ROWS, TEXT = 200, 300
"""Samples in a run's table, and characters of a text in it: a page has to open in a browser."""
LINES_OF_SWEEPS = ("kl_by_position",)
"""Figures in which a job is one line: its sweep's show it, its own files have the numbers."""
TABLES_TAG = "mlflow.loggedArtifacts"
"""The tag in which MLflow keeps which files are tables."""
_STYLE = (
    "body{font:14px sans-serif}table{border-collapse:collapse}"
    "th,td{padding:4px 8px;text-align:right;white-space:nowrap;border-bottom:1px solid #ccc}"
    "th:first-child,td:first-child{text-align:left}"
)
_SWEEP_SAMPLES = 64
"""Jobs of a sweep whose samples are kept in memory while its figures are drawn."""


def write_sweep(folder: Path, root: Path, sweep: Sweep, records: Sequence[Record]) -> Texts:
    """Write a sweep's tables, figures and report into ``folder``; return no tags.

    By key throughout: run ids are the store's own and change when it is made anew.
    """
    forms = {"md": report.markdown, "tex": report.latex, "csv": report.csv, "html": _page}
    for ending, make in forms.items():
        (folder / f"table.{ending}").write_text(make(records), encoding="utf-8")

    @lru_cache(_SWEEP_SAMPLES)
    def samples(key: str) -> list[Record]:
        return samples_of(root, key)

    figures = of_sweep(records, samples)
    for name, drawing in figures.items():
        save(drawing, folder, name)
    experiment = named_in(sweep.argv or [])
    text = html(records, samples, sweep.argv, experiment, figures)
    (folder / "report.html").write_text(text, encoding="utf-8")
    return {}


def _page(records: Sequence[Record]) -> str:
    """Return the table with its notes as a page of its own."""
    found = frame(records)
    below = "".join(f"<p>{escape(note)}</p>\n" for note in notes(found))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>table</title>\n'
        f"<style>{_STYLE}</style>\n{html_table(cells(found))}\n{below}</html>\n"
    )


def write_job(folder: Path, root: Path, record: Record, diff: Path) -> Texts:
    """Write one record's files into ``folder`` and return the tags that go with them.

    Config, record, samples, log, environment, diff, figures with their numbers, and two tables:
    its samples and its layers. Drawing is most of what logging a job costs: no PDF here.
    """
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(record["config"]), encoding="utf-8")
    _write_json(folder / "record.json", {**record, "mlflow_run_id": None})
    _write_json(folder / "environment.json", record["environment"])
    source = record_dir(root, record["key"])
    for path, name in ((source / SAMPLES, SAMPLES), (source / LOG, LOG), (diff, "git.diff")):
        if path.is_file():
            shutil.copyfile(path, folder / name)
    samples = samples_of(root, record["key"])
    for name, drawing in of_job(record, samples).items():
        if name not in LINES_OF_SWEEPS:
            (folder / f"{name}.png").write_bytes(image(drawing, "png"))
        (folder / f"{name}.csv").write_text(numbers(drawing), encoding="utf-8")
    tables = {"samples.json": samples[:ROWS], "layers.json": layer_rows(record, samples)}
    tables = {name: rows for name, rows in tables.items() if rows}
    for name, rows in tables.items():
        (folder / name).write_text(table(rows), encoding="utf-8")
    return {
        TABLES_TAG: json.dumps([{"path": name, "type": "table"} for name in tables]),
        "mlflow.note.content": _note(record, len(samples)),
    }


def command(words: Sequence[str]) -> str:
    """Return the command line of the words behind run.py."""
    return shlex.join(["python", "run.py", *words])


def samples_of(root: Path, key: str) -> list[Record]:
    """Return the samples of a record, none where it has no file. ValueError for a broken line."""
    path = record_dir(root, key) / SAMPLES
    return read_samples(path) if path.is_file() else []


def table(rows: Sequence[Record]) -> str:
    """Return rows as MLflow's pages show a table: columns as they first appear, none empty."""
    seen = (name for row in rows for name, value in row.items() if value is not None)
    columns = list(dict.fromkeys(seen))
    data = [[_cell(row.get(name)) for name in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}) + "\n"


def _cell(value: Any) -> Any:
    """Return a value as a table shows it: lists and dicts as JSON, long texts cut."""
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and len(value) > TEXT:
        return f"{value[: TEXT - 1]}…"
    return value


def _note(record: Record, count: int) -> str:
    """Return a job's description: its command, and what of its samples the table shows."""
    lines = [f"Record `{record['key']}`"]
    if words := record.get("words"):
        lines += ["Computed again by", f"```\n{command(words)}\n```"]
    if count:
        shown = "all" if count <= ROWS else f"the first {ROWS} of"
        lines += [
            f"`samples.json` shows {shown} {count} samples, texts cut to {TEXT} characters;"
            f" `{SAMPLES}` has them whole."
        ]
    return "\n\n".join(lines) + "\n"


def _write_json(path: Path, value: Any) -> None:
    """Write a value as JSON that people read."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
