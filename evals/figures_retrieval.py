"""Needle and passkey heat maps: accuracy by length and depth, from a job's samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evals.drawing import (
    HEAT,
    Drawing,
    Record,
    Row,
    Samples,
    cells,
    colour_scale,
    drawing,
    panels,
    short,
    where,
)
from evals.settings import labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Place = tuple[int, float | None]
"""Length in tokens, depth (0 = start, None = not placed)."""
_Found = dict[Place, list[float]]


def retrieval(records: Sequence[Record], samples: Samples) -> Drawing | None:
    """Draw accuracy by length and depth, one panel a job, a cell each, with its number of items.

    Lengths and depths are those of the job's config and of the samples (``length`` in tokens,
    ``depth`` a share or None, ``scores`` with ``acc``); a cell that no sample is from is hatched
    and says so. None where no sample has a length.
    """
    jobs: list[tuple[str, Record, _Found]] = []
    for group in panels(records).values():
        names = labels([record["config"] for record in group])
        for record, name in zip(group, names, strict=True):
            asks = record["config"]["dataset"].get("lengths")
            if asks and (found := _cells(samples(record["key"]))):
                jobs.append((name, record, found))
    if not jobs:
        return None
    axes_of = [_axes(record, found) for _, record, found in jobs]
    size = 2.9 + 0.8 * max(len(x) for x, _ in axes_of), 1.6 + 0.5 * max(len(y) for _, y in axes_of)
    figure, axes = cells(len(jobs), size)
    for axis, (name, record, found), places in zip(axes, jobs, axes_of, strict=True):
        _draw(axis, found, *places)
        title = " · ".join([*list(where(record).values())[:2], name])
        axis.set_title(short(title, int(11 * size[0])), fontsize=9)
    colour_scale(figure, axes, 1.0, "accuracy")
    return drawing(figure, [row for job in zip(jobs, axes_of, strict=True) for row in _rows(*job)])


def _cells(samples: Sequence[Record]) -> _Found:
    """Return the accuracies of the items of each cell."""
    found: _Found = {}
    for sample in samples:
        if sample.get("length") is not None and "acc" in sample.get("scores", {}):
            place = sample["length"], sample.get("depth")
            found.setdefault(place, []).append(float(sample["scores"]["acc"]))
    return found


def _axes(record: Record, found: _Found) -> tuple[list[int], list[float | None]]:
    """Return the lengths and the depths, in order, of what was asked and what was found."""
    asked, seen = record["config"]["dataset"], {depth for _, depth in found}
    lengths = sorted({*(asked.get("lengths") or ()), *(length for length, _ in found)})
    depths: list[float | None] = [None] if None in seen else []
    depths += sorted({*(asked.get("depths") or ()), *(d for d in seen if d is not None)})
    return lengths, depths


def _rows(job: tuple[str, Record, _Found], axes: tuple[list[int], list[float | None]]) -> list[Row]:
    """Return a job's numbers, a row a cell, those not measured included."""
    name, record, found = job
    return [
        {**where(record), "method": name, "length": length, "depth": depth,
         "accuracy": _mean(found.get((length, depth), [])) if (length, depth) in found else None,
         "items": len(found.get((length, depth), [])), "key": record["key"]}
        for depth in axes[1]
        for length in axes[0]
    ]  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    """Return the mean, NaN of nothing."""
    return sum(values) / len(values) if values else float("nan")


def _draw(axis: Axes, found: _Found, lengths: list[int], depths: list[float | None]) -> None:
    """Draw one job's heat map."""
    shares = [[_mean(found.get((x, y), [])) for x in lengths] for y in depths]
    axis.imshow(shares, cmap=HEAT, vmin=0, vmax=1, aspect="auto")
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            _draw_cell(axis, column, row, found.get((length, depth), []))
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), ["any" if d is None else f"{d:g}" for d in depths])
    axis.set(xlabel="length (tokens)", ylabel="depth (0 = start)")


def _draw_cell(axis: Axes, column: int, row: int, values: Sequence[float]) -> None:
    """Write a cell's accuracy and number of items into it, or mark it as not measured."""
    if values:
        share = _mean(values)
        ink = "black" if share >= 0.45 else "white"
        text = f"{share:.2f}\nn={len(values)}"
    else:
        from matplotlib.patches import Rectangle

        ink, text = "black", "not\nmeasured"
        corner = column - 0.5, row - 0.5
        axis.add_patch(
            Rectangle(corner, 1, 1, facecolor="#EEEEEE", edgecolor="#BBBBBB", hatch="//")
        )
    axis.text(column, row, text, ha="center", va="center", color=ink, fontsize=7)
