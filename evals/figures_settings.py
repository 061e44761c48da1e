"""Rank and sparsity curves: what a sweep's metrics do as one setting of GEAR varies.

A line is every other setting fixed, so its points differ in the one setting alone; a setting that
differs between layers or between K and V has no place on the axis and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evals.columns import headline, missing
from evals.drawing import (
    COLOURS,
    LINES,
    MARKERS,
    Drawing,
    Record,
    Row,
    drawing,
    ends,
    grid,
    panels,
    short,
    where,
)
from evals.settings import flatten, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_METRICS = {
    "fidelity/delta_nll": "ΔNLL (nats per token)",
    "fidelity/kl_mean": "KL from fp16 (nats per token)",
    "reconstruction/k_rel_err": "relative error of K",
    "reconstruction/v_rel_err": "relative error of V",
}
"""Metrics drawn where they were measured, with a downstream task's own score."""
_Line = dict[float, Record]


def rank(records: Sequence[Record]) -> Drawing | None:
    """Draw the metrics against ``gear.rank``; None where no line has two ranks."""
    return _curves(records, "rank")


def sparsity(records: Sequence[Record]) -> Drawing | None:
    """Draw the metrics against ``gear.sparse_frac``; None where no line has two of them."""
    return _curves(records, "sparse_frac")


def _curves(records: Sequence[Record], setting: str) -> Drawing | None:
    """Draw a row a panel of records and a column a metric."""
    found = {name: _lines(group, setting) for name, group in panels(records).items()}
    rows = [row for lines in found.values() for row in _rows(lines, setting)]
    if not rows:
        return None
    drawn = {name: lines for name, lines in found.items() if _rows(lines, setting)}
    columns = max(len({row["metric"] for row in _rows(g, setting)}) for g in drawn.values())
    figure, axes = grid(len(drawn), columns, (4.2, 3.4))
    figure.set_figwidth(figure.get_figwidth() + 2.9)
    for line_axes, (name, lines) in zip(axes, drawn.items(), strict=True):
        of_panel = _rows(lines, setting)
        metrics = list(dict.fromkeys(row["metric"] for row in of_panel))
        for axis, metric in zip(line_axes, metrics, strict=False):
            _draw(axis, [row for row in of_panel if row["metric"] == metric])
            axis.set(xlabel=f"gear.{setting}", ylabel=_METRICS.get(metric, metric))
        for unused in line_axes[len(metrics) :]:
            unused.remove()
        line_axes[0].set_title(short(name, 60), fontsize=9, loc="left")
        last = line_axes[len(metrics) - 1]
        last.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=6.5, frameon=False)
    return drawing(figure, rows)


def _lines(records: Sequence[Record], setting: str) -> dict[str, _Line]:
    """Return by name the lines of two or more values of the setting: {value: record}."""
    found: dict[tuple[tuple[str, str], ...], _Line] = {}
    bare = [_without(record["config"], setting) for record in records]
    for record, config in zip(records, bare, strict=True):
        value = flatten(record["config"]).get(f"gear.{setting}", "")
        if value.replace(".", "", 1).replace("e-", "", 1).isdigit():
            found.setdefault(tuple(flatten(config).items()), {})[float(value)] = record
    lines = [line for line in found.values() if len(line) > 1]
    firsts = [next(iter(line.values()))["config"] for line in lines]
    names = labels([_without(config, setting) for config in firsts])
    return dict(zip(names, lines, strict=True))


def _without(config: dict[str, Any], setting: str) -> dict[str, Any]:
    """Return the config without one setting of K and V in every layer."""

    def bare(layer: dict[str, Any]) -> dict[str, Any]:
        sides = {side: {k: v for k, v in layer[side].items() if k != setting}
                 for side in ("k", "v") if side in layer}  # fmt: skip
        return {**layer, **sides}

    cache = config["cache"]
    return {**config, "cache": {**cache, "layers": [bare(x) for x in cache.get("layers") or []]}}


def _rows(lines: dict[str, _Line], setting: str) -> list[Row]:
    """Return the points of all lines, metric by metric, in the order of the setting."""
    rows = []
    for name, line in lines.items():
        for value, record in sorted(line.items()):
            score = headline(record)
            for metric in (*_METRICS, *([score] if score else [])):
                number, low, high = (
                    record["metrics"].get(metric + e) for e in ("", "_low", "_high")
                )
                if not missing(number):
                    measured = {"metric": metric, "value": number, "low": low, "high": high}
                    line_of = {**where(record), "line": name, setting: value}
                    rows.append({**line_of, **measured, "key": record["key"]})
    return rows


def _draw(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw one metric's lines with their intervals."""
    (setting,) = set(rows[0]) - {"model", "dataset", "eval", "line", "metric", "value", "low",
                                 "high", "key"}  # fmt: skip
    names = list(dict.fromkeys(row["line"] for row in rows))
    for i, name in enumerate(names):
        line = [row for row in rows if row["line"] == name]
        x, y = [row[setting] for row in line], [row["value"] for row in line]
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        dashes = LINES[i // len(COLOURS) % len(LINES)]
        axis.plot(
            x, y, color=colour, marker=marker, linestyle=dashes, markersize=4.5, label=short(name)
        )
        for row in line:
            spread = ends(row["value"], row["low"], row["high"])
            if spread:
                place = [row[setting]], [row["value"]], spread
                axis.errorbar(
                    *place, fmt="none", ecolor=colour, elinewidth=0.8, capsize=2, alpha=0.6
                )
    axis.set_xticks(sorted({row[setting] for row in rows}))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.25)
