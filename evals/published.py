"""What papers report, looked up for a cell: evals/published.yaml, never part of a record.

A value is found by the cell's method with the settings the paper states, its dataset and its model.
Where the paper has not that model, the first of its table stands in and is named as another one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Published:
    """One reported value, in percent."""

    value: float
    source: str
    model: str
    """The paper's model, by the paper's name."""
    differs: str | None
    """What is different from the cell's model; None where it is the same."""


def lookup(settings: Mapping[str, str], model: str, dataset: str) -> Published | None:
    """Return what is reported for a cell, None where nothing is.

    ``settings`` are flat (:func:`evals.settings.flatten`), ``model`` and ``dataset`` names of
    options. Another number of exemplars than the task's own is another task.
    """
    known = _known()
    table = next((table for table in known["tables"] if dataset in table["datasets"]), None)
    if table is None or "dataset.num_fewshot" in settings:
        return None
    theirs = model if model in table["models"] else table["models"][0]
    about = known["models"][theirs]
    for method in _methods(settings):
        if values := table["values"][theirs].get(method):
            differs = about.get("differs") if theirs == model else f"another model than {model}"
            value = values[table["datasets"].index(dataset)]
            return Published(value, known["source"], about["name"], differs)
    return None


def over_all(
    settings: Mapping[str, str], columns: Collection[tuple[str, str]], what: str = "mean"
) -> Published | None:
    """Return a row's reported ``mean`` or ``kv_size_pct``, where its table is all of a paper's.

    ``columns`` are the (model, dataset) of each.
    """
    known = _known()
    for table in known["tables"]:
        paper = {(model, data) for model in table["models"] for data in table["datasets"]}
        if set(columns) != paper or what not in table or "dataset.num_fewshot" in settings:
            continue
        models = [known["models"][model] for model in table["models"]]
        differs = next((m["differs"] for m in models if "differs" in m), None)
        names = ", ".join(m["name"] for m in models)
        for method in _methods(settings):
            if method in table[what]:
                return Published(table[what][method], known["source"], names, differs)
    return None


def _methods(settings: Mapping[str, str]) -> list[str]:
    """Return the paper's methods that settings are; a method may be stated in several ways."""
    return [
        name
        for name, stated in _known()["methods"].items()
        if all(settings.get(_setting(n)) == _text(value) for n, value in stated.items())
    ]


def _setting(name: str) -> str:
    """Return the flat name of what a method states."""
    return "cache.name" if name == "cache" else name


def _text(value: Any) -> str:
    """Return a value as flat settings hold it."""
    return value if isinstance(value, str) else json.dumps(value)


@cache
def _known() -> dict[str, Any]:
    """Return the file's content."""
    path = Path(__file__).with_name("published.yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))
