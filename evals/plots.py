"""Figures from records, drawn off-screen: quality against bytes, one job by layer, retrieval.

Colours are Okabe and Ito's, which colour-blind readers can tell apart, and cividis for shares.
Each function returns None where the records hold nothing to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evals.columns import frame
from evals.record import FINISHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]
Row = dict[str, Any]
Cell = tuple[int, float | None]  # length in tokens, depth

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MIB = 2**20


def _figure(
    panels: int, height: float, layout: Literal["constrained"] | None
) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``panels`` axes side by side; no pyplot, so no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * panels, height), layout=layout)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the file's ending picks the format. The same figure gives the same PNG."""
    figure.savefig(path, dpi=144)


def pareto(records: Sequence[Record]) -> Figure | None:
    """Draw quality against stored bytes (MiB), one panel per model, dataset and protocol.

    Quality is ΔNLL against fp16 in nats per token with its interval (fp16 itself at 0), or token
    perplexity where no record has a ΔNLL. The line joins the methods that no other one beats in
    both. A failed job is left out. None when no other has both numbers.
    """
    caches = {record["key"]: record["config"]["cache"]["name"] for record in records}
    palette = dict(zip(dict.fromkeys(caches.values()), cycle(COLOURS), strict=False))
    rows = frame(records).astype(object).to_dict("records")
    compared = any(_number(row["delta_nll"]) for row in rows)
    quality = "delta_nll" if compared else "ppl_token"
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if compared and caches[row["key"]] == "fp16" and _number(row["ppl_token"]):
            row["delta_nll"] = 0.0
        measured = _number(row["stored_bytes"]) and _number(row[quality])
        if measured and row["status"] == FINISHED:
            title = " · ".join((row["model"], row["dataset"], row["eval"]))
            panels.setdefault(title, []).append(row)
    if not panels:
        return None
    figure, axes = _figure(len(panels), 4.2, "constrained")
    for axis, (title, points) in zip(axes, panels.items(), strict=True):
        _draw_front(axis, points, quality)
        for point in points:
            _draw_point(axis, point, quality, palette[caches[point["key"]]])
        axis.set(title=title, xlabel="stored KV cache (MiB)")
        axis.set_ylabel("ΔNLL (nats per token)" if compared else "token perplexity")
        axis.margins(x=0.15)  # room for the names
        axis.grid(alpha=0.25)
    return figure


def _number(value: Any) -> bool:
    """Tell whether a cell holds a number (NaN and None do not)."""
    return value is not None and value == value


def _draw_point(axis: Axes, row: Row, quality: str, colour: str) -> None:
    """Draw one method with its interval and its name."""
    x, y = row["stored_bytes"] / _MIB, row[quality]
    low, high = row[f"{quality}_low"], row[f"{quality}_high"]
    ends = None
    if _number(low) and _number(high):
        # A bootstrap's interval need not hold the estimate, and matplotlib wants lengths.
        ends = [[max(y - low, 0.0)], [max(high - y, 0.0)]]
    axis.errorbar([x], [y], yerr=ends, fmt="o", color=colour, capsize=3)
    axis.annotate(row["method"], (x, y), (5, 5), textcoords="offset points", fontsize=7)


def _draw_front(axis: Axes, rows: Sequence[Row], quality: str) -> None:
    """Draw the Pareto front: fewer bytes and a lower ``quality`` are better."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["stored_bytes"], row[quality])):
        if not front or row[quality] < front[-1][quality]:
            front.append(row)
    x, y = [row["stored_bytes"] / _MIB for row in front], [row[quality] for row in front]
    axis.plot(x, y, color="#999999", linewidth=1, drawstyle="steps-post", zorder=0)


def per_layer(record: Record, samples: Sequence[Record]) -> Figure | None:
    """Draw a job by layer: stored bytes before fp16's (MiB), and the errors of its samples.

    Errors of K and V are means over windows and heads of ||X - X'|| / ||X|| (reconstruction only).
    None where the job has neither.
    """
    layers = record.get("bytes", {}).get("per_layer") or []
    errors = {side: _errors(samples, f"{side}_rel_err") for side in ("k", "v")}
    errors = {side: values for side, values in errors.items() if values}
    panels = bool(layers) + bool(errors)
    if not panels:
        return None
    figure, axes = _figure(panels, 3.8, None)  # one a job: a layout engine doubles its cost
    figure.subplots_adjust(bottom=0.14)
    if layers:
        edges = [layer["layer"] - 0.5 for layer in layers] + [layers[-1]["layer"] + 0.5]
        for name, colour in (("fp16", "#DDDDDD"), ("stored", COLOURS[0])):
            heights = [layer[f"{name}_bytes"] / _MIB for layer in layers]
            axes[0].stairs(heights, edges, fill=True, color=colour, label=name)
        axes[0].set_ylabel("KV cache (MiB)")
    for (side, values), colour in zip(errors.items(), COLOURS, strict=False):
        axes[-1].plot(list(values), list(values.values()), "o-", color=colour, label=side.upper())
    if errors:
        axes[-1].set(ylabel="relative error", ylim=(0, None))
    for axis in axes:
        axis.set_xlabel("layer")
        axis.locator_params(axis="x", integer=True)
        axis.legend(fontsize=7)
    return figure


def _errors(samples: Sequence[Record], name: str) -> dict[int, float]:
    """Return {layer: mean over windows and heads} of an error that samples hold by head."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        for layer in sample.get("layers", []):
            found.setdefault(layer["layer"], []).extend(layer[name])
    return {layer: sum(values) / len(values) for layer, values in sorted(found.items())}


def retrieval(record: Record, samples: Sequence[Record]) -> Figure | None:
    """Draw accuracy by length and depth, a cell each, with its number of items.

    Lengths and depths are those of the job's config and of the samples (``length`` in tokens,
    ``depth`` a share or None, ``scores`` with ``acc``); a cell that no sample is from is hatched
    and says so. None where no sample has a length.
    """
    cells: dict[Cell, list[float]] = {}
    for sample in samples:
        if sample.get("length") is not None and "acc" in sample.get("scores", {}):
            cell = sample["length"], sample.get("depth")
            cells.setdefault(cell, []).append(float(sample["scores"]["acc"]))
    if not cells:
        return None
    asked = record["config"]["dataset"]
    lengths = sorted({*(asked.get("lengths") or ()), *(length for length, _ in cells)})
    found = {depth for _, depth in cells}
    depths: list[float | None] = [None] if None in found else []
    depths += sorted({*(asked.get("depths") or ()), *(d for d in found if d is not None)})
    size = 2.6 + 0.9 * len(lengths), 1.6 + 0.5 * len(depths)
    figure, axis = _sized_figure(size)
    shares = [[_mean(cells.get((x, y), [])) for x in lengths] for y in depths]
    image = axis.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    figure.colorbar(image, ax=axis, label="accuracy")
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            _draw_cell(axis, column, row, cells.get((length, depth), []))
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), ["any" if d is None else f"{d:g}" for d in depths])
    axis.set(xlabel="length (tokens)", ylabel="depth (0 = start)", title=_heading(record))
    return figure


def _sized_figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Return a figure of ``size`` inches with one axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def _mean(values: Sequence[float]) -> float:
    """Return the mean, NaN of nothing."""
    return sum(values) / len(values) if values else float("nan")


def _heading(record: Record) -> str:
    """Return model, data and cache of a job."""
    return " · ".join(record["config"][part]["name"] for part in ("model", "dataset", "cache"))


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
