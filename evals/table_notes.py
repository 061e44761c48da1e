"""The notes below a table: marks, how it was measured, and what is missing or failed and why."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from evals import columns
from evals.record import FAILED, FINISHED
from evals.table_cells import MISSING, P_VALUE, lines
from evals.tables import DAGGER, NOT_HERE, PILCROW, Table

Record = dict[str, Any]


def notes(table: Table, command: Sequence[str]) -> list[str]:
    """Return a table's notes, a line each; ``command`` are the words behind run.py.

    Everything that does not vary is said here and not in the table.
    """
    records = [cell.record for cell in table.cells if cell.record]
    return [
        *_measured(table, [r for r in records if r["status"] == FINISHED]),
        *_marks(table),
        *_reported(table),
        *_absent(table),
        f"Made by: {shlex.join(['python', 'run.py', *command])}",
    ]


def _measured(table: Table, records: Sequence[Record]) -> list[str]:
    """Return how, on what and with which code the finished records were measured."""
    if not records:
        return []
    configs = [record["config"] for record in records]
    told = [f"Protocol {_list(str(c['protocol']) for c in configs)}: {_list(map(walk, configs))}"]
    if any(line["low"] is not None for line in lines(table.data)):
        confidence = _list(f"{c['eval'].get('confidence', 0.95):.0%}" for c in configs)
        told[0] += f"; [low, high] are {confidence} intervals"
    commits = _list(commit(record["environment"].get("git")) for record in records)
    where = _list(f"{c['backend']} {c['dtype']}" for c in configs)
    seeds = _list(str(config["seed"]) for config in configs)
    weights = _list(f"{c['model']['name']} {c['model']['weight_hash'][:8]}" for c in configs)
    return [
        *told,
        f"Data: {_list(map(data, records))}; seed {seeds}",
        f"Model weights: {weights}; {where}; commit {commits}",
    ]


def walk(config: dict[str, Any]) -> str:
    """Return how tokens went through the cache."""
    settings = config["eval"]
    prefill = "" if settings.get("prefill", "exact") == "exact" else ", streaming prefill"
    if "prefill_tokens" not in settings:
        return settings["name"] + prefill
    tokens = f"{settings['prefill_tokens']} tokens of prefill, {settings['scored_tokens']} scored"
    return f"{settings['name']}, {tokens}{prefill}"


def data(record: Record) -> str:
    """Return a dataset with its hash and how much of it was used."""
    dataset, metrics = record["config"]["dataset"], record["metrics"]
    if "data/items" in metrics:
        items, total = int(metrics["data/items"]), int(metrics["data/items_total"])
        size = f"{items} items" if items == total else f"{items} of {total} items"
    else:
        each = dataset.get("windows_per_document", 1)
        windows = "all windows" if each is None else f"{each} window{'s' * (each != 1)}"
        size = f"{dataset['n_documents']} documents, {windows} of each"
    return f"{dataset['name']} {dataset['content_hash'][:8]} ({size})"


def commit(git: dict[str, Any] | None) -> str:
    """Return a commit, and whether there were changes on top."""
    if git is None:
        return "unknown"
    return git["commit"][:8] + (" with uncommitted changes" if git["dirty"] else "")


def _list(texts: Iterable[str]) -> str:
    """Return each text once."""
    return ", ".join(dict.fromkeys(texts))


def _marks(table: Table) -> list[str]:
    """Return what the marks in the table mean."""
    every, found = lines(table.data), []
    if any(line["delta"] is not None for line in every):
        found.append("Δ: difference to fp16 on the same items or windows")
    if any(line["best"] for line in every):
        found.append("bold: best of a column, fp16 aside")
    if any(line["significant"] for line in every):
        found.append(
            f"{DAGGER} differs from fp16: p below {P_VALUE} in McNemar's exact test or, where"
            " answers are not right or wrong, an interval of the difference without 0"
        )
    methods = "".join(method for method, _ in table.rows)
    return found + [f"{mark} {text}" for mark, text in columns.NOTES.items() if mark in methods]


def _reported(table: Table) -> list[str]:
    """Return where reported values are from, and for which other models."""
    shown = [line for line in lines(table.data) if line["reported"] is not None]
    if not shown:
        return []
    source = _list(line["reported_by"] for line in shown)
    other = _list(
        f"{line['reported_model']} beside {line['model']} ({line['reported_differs']})"
        for line in shown
        if line["reported_differs"] is not None
    )
    about = [f"{PILCROW} reported for a different model: {other}"] if other else []
    return [f"reported: as in the {source}; not measured here", *about]


def _absent(table: Table) -> list[str]:
    """Return how many cells are missing and why, and why each failed one failed."""
    cells = {line["name"]: line for line in lines(table.data)}
    gone = [line["reason"] for line in cells.values() if line["status"] == MISSING]
    found = []
    if gone:
        why = Counter(reason or "not run yet" for reason in gone)
        each = "; ".join(f"{count}: {text}" for text, count in why.items())
        found.append(f"{NOT_HERE} {len(gone)} of {len(cells)} cells have no record. {each}")
    for name, line in cells.items():
        if line["status"] == FAILED:
            found.append(f"failed: {name}: {line['reason']}")
    return found
