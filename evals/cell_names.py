"""Where a job stands in a table: its row is the method, its column model, data and protocol.

A row is named by the cache and by those settings that vary, compared within a column and among jobs
of the same cache: what a dataset's file sets for itself makes no rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evals.settings import flatten, varied

Flat = dict[str, str]
_OF_COLUMNS = ("model.", "dataset.")
_PROTOCOL = ("eval.name", "eval.task", "eval.protocol")


@dataclass(frozen=True)
class Place:
    """One job's row and column, each part as a person reads it."""

    row: str
    model: str
    dataset: str
    protocol: str
    """The eval's name, and its protocol where that is another; empty unless datasets have two."""
    settings: Flat
    """All settings of the job by name."""

    @property
    def column(self) -> tuple[str, str, str]:
        """Return what two jobs of one column share."""
        return self.model, self.dataset, self.protocol

    @property
    def name(self) -> str:
        """Return the job's name."""
        parts = (self.row, self.dataset, self.protocol, self.model)
        return " · ".join(part for part in parts if part)


def places(configs: Sequence[dict[str, Any]]) -> list[Place]:
    """Return the place of each config (``evals.cells.described``, or a record's); names differ.

    Equal configs, which no command has, would be numbered.
    """
    flats = [flatten(config) for config in configs]
    models, datasets = _labels(flats, "model"), _labels(flats, "dataset")
    protocols = _protocols(flats, datasets)
    columns = list(zip(models, datasets, protocols, strict=True))
    rows = _rows(flats, columns)
    found = [Place(row, *column, flat) for row, column, flat in zip(rows, columns, flats)]  # noqa: B905
    seen: Counter[str] = Counter()
    for index, place in enumerate(found):
        seen[place.name] += 1
        if seen[place.name] > 1:
            found[index] = replace(place, row=f"{place.row} #{seen[place.name]}")
    return found


def _labels(flats: Sequence[Flat], group: str) -> list[str]:
    """Return the name of each job's option in a group, with its settings that vary."""
    own = [{n: v for n, v in flat.items() if n.startswith(f"{group}.")} for flat in flats]
    names = [flat.get(f"{group}.name", "?") for flat in flats]
    return [_named(n, {k: v for k, v in more.items() if k != group})
            for n, more in zip(names, varied(own), strict=True)]  # fmt: skip


def _protocols(flats: Sequence[Flat], datasets: Sequence[str]) -> list[str]:
    """Return each job's protocol where its dataset has several, else nothing."""
    own = [" ".join(dict.fromkeys(_protocol(flat))) for flat in flats]
    several = {
        data: len({o for o, d in zip(own, datasets, strict=True) if d == data}) > 1
        for data in datasets
    }
    return [name if several[data] else "" for name, data in zip(own, datasets, strict=True)]


def _protocol(flat: Flat) -> Iterable[str]:
    """Yield the eval's name, and its protocol."""
    yield flat.get("eval.name", "?")
    if "eval.protocol" in flat and flat.get("eval.task") == "perplexity":
        yield flat["eval.protocol"]


def _rows(flats: Sequence[Flat], columns: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the name of each job's row."""
    caches = [flat.get("cache.name", "?") for flat in flats]
    names: dict[str, dict[str, None]] = {cache: {} for cache in caches}
    for column in dict.fromkeys(columns):
        inside = [index for index, other in enumerate(columns) if other == column]
        for index, more in zip(inside, varied([flats[i] for i in inside]), strict=True):
            names[caches[index]] |= dict.fromkeys(more)
    rows = []
    for flat, cache in zip(flats, caches, strict=True):
        kept = [n for n in names[cache] if n in flat]
        kept = [n for n in kept if not n.startswith(_OF_COLUMNS) and n not in _PROTOCOL]
        rows.append(_named(cache, {n: flat[n] for n in kept}))
    return rows


def _named(name: str, more: Flat) -> str:
    """Return a name with settings in brackets."""
    return f"{name} ({', '.join(f'{n}={v}' for n, v in more.items())})" if more else name
