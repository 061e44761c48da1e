"""What a run shows: name, tags, parameters, metrics and files of one record, or of a whole sweep.

Made from records alone, so the same records give the same run in any store. No MLflow here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from evals import report
from evals.environment import git_diff, git_state
from evals.record import FAILED, FINISHED, record_dir, write_whole
from evals.settings import flatten
from evals.sweeps import Sweep
from evals.tracking_files import command, write_job, write_sweep

Record = dict[str, Any]
Texts = dict[str, str]

NAME_LENGTH, VALUE_LENGTH, TAG_LENGTH = 250, 6000, 8000
"""MLflow's limits, in characters; a run's description is a tag."""
GROUPS = ("model", "dataset", "eval")
"""Config groups whose option names are tags of every run, so that one filter finds all."""


@dataclass(frozen=True)
class RunView:
    """One run: ``key`` is its record's, empty for a sweep's parent; ``write`` fills a folder."""

    key: str
    name: str
    records: Sequence[Record]
    tags: Texts
    params: Texts
    metrics: dict[str, float]
    write: Callable[[Path], Texts]
    """Writes the files and returns the tags that go with them."""

    @property
    def status(self) -> str:
        """FAILED where any record is."""
        return FAILED if any(r["status"] == FAILED for r in self.records) else FINISHED

    @property
    def start(self) -> int:
        """When the first record was begun, in milliseconds since 1970."""
        return min(_milliseconds(record["started"]) for record in self.records)

    @property
    def end(self) -> int:
        """When the last record was finished, in milliseconds since 1970."""
        return max(_milliseconds(record["finished"]) for record in self.records)

    @property
    def datasets(self) -> list[Record]:
        """The datasets of its records, each once."""
        found = [record["config"]["dataset"] for record in self.records]
        return list({dataset["content_hash"]: dataset for dataset in found}.values())


def sweep_run(sweep: Sweep, records: Sequence[Record], root: Path) -> RunView:
    """Return the parent's view; its parameters are the settings that all jobs share."""
    flats = [flatten(record["config"]) for record in records]
    shared = {k: v for k, v in flats[0].items() if all(flat.get(k) == v for flat in flats)}
    typed = "" if sweep.argv is None else command(sweep.argv)
    tags = _tags(sweep, "sweep", records)
    tags |= {"gear.command": typed, "mlflow.note.content": note(typed, records)}
    parts = [tags[f"gear.{group}"] for group in GROUPS]
    if experiment := [w for w in sweep.argv or [] if w.startswith("experiment=")]:
        tags["gear.experiment"] = experiment[-1].partition("=")[2]
        parts.insert(0, tags["gear.experiment"])
    name = " · ".join([*parts, f"{len(records)} job{'s' if len(records) > 1 else ''}"])

    def write(folder: Path) -> Texts:
        return write_sweep(folder, root, sweep, records)

    return RunView("", name, records, tags, _params(shared), {}, write)


def job_run(sweep: Sweep, record: Record, name: str, root: Path, parent: str) -> RunView:
    """Return the view of one record under the run ``parent``; its files lie under ``root``."""
    tags = _tags(sweep, "job", [record]) | {
        "gear.key": record["key"],
        "gear.parent": parent,
        "gear.reused": json.dumps(record["key"] in sweep.reused),
        "mlflow.parentRunId": parent,
    }
    if git := record["environment"].get("git"):
        tags |= {"mlflow.source.git.commit": git["commit"], "gear.dirty": json.dumps(git["dirty"])}
    if reasons := report.failures([record]):
        tags["gear.error"] = reasons[0][1]
    metrics = {
        _named(metric): value
        for metric, value in record["metrics"].items()
        # MLflow would store infinity as 1.8e308 and NaN as 0.
        if value is not None and math.isfinite(value)
    }

    def write(folder: Path) -> Texts:
        return write_job(folder, root, record, _diff_path(root, record))

    params = _params(flatten(record["config"]))
    return RunView(record["key"], name, [record], tags, params, metrics, write)


def _params(flat: Texts) -> Texts:
    """Return settings as MLflow takes parameters."""
    return {_named(name): value[:VALUE_LENGTH] for name, value in flat.items()}


def _named(text: str) -> str:
    """Return a metric's or parameter's name as MLflow takes it (no commas, cut to its limit)."""
    return re.sub(r"[^\w\-. /]", "_", text)[:NAME_LENGTH]


def _tags(sweep: Sweep, kind: str, records: Sequence[Record]) -> Texts:
    """Return the tags that parent and children share, and what the run was made from."""
    digests = "".join(digest(record) for record in records)
    tags = {
        "gear.kind": kind,
        "gear.jobset": sweep.jobset,
        "gear.record": hashlib.sha256(digests.encode()).hexdigest(),
        "mlflow.source.name": "run.py",
        "mlflow.source.type": "LOCAL",
    }
    for group in GROUPS:
        names = dict.fromkeys(record["config"][group]["name"] for record in records)
        tags[f"gear.{group}"] = ", ".join(names)
    return tags


def digest(record: Record) -> str:
    """Return the sha256 of what was measured: the record without its run id, which comes later."""
    text = json.dumps({**record, "mlflow_run_id": None}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def note(typed: str, records: Sequence[Record]) -> str:
    """Return the parent's description: the command and the table, cut to whole lines that fit."""
    text = (f"`{typed}`\n\n" if typed else "") + report.markdown(records)
    if len(text) <= TAG_LENGTH:
        return text
    ending = "\n\n(cut: see table.md)\n"
    return text[: TAG_LENGTH - len(ending)].rpartition("\n")[0] + ending


def keep_diffs(root: Path, records: Sequence[Record], checkout: Path) -> None:
    """Put the checkout's diff beside each record just measured on it; later the diff is gone.

    Only while the checkout is at the record's commit, and once: the name holds the record's digest.
    """
    state = git_state(checkout)
    if state is None or not state["dirty"]:
        return
    diff = git_diff(checkout)
    for record in records if diff else ():
        measured_here = record["environment"].get("git") == state
        new = record["mlflow_run_id"] is None and not _diff_path(root, record).exists()
        if measured_here and new:
            write_whole(_diff_path(root, record), diff + "\n")


def _diff_path(root: Path, record: Record) -> Path:
    """Return where the diff of a record is kept."""
    return record_dir(root, record["key"]) / f"git-{digest(record)[:12]}.diff"


def _milliseconds(moment: str) -> int:
    """Return an ISO 8601 time as MLflow counts it."""
    return round(datetime.fromisoformat(moment).timestamp() * 1000)
