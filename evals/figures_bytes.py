"""What a method's bytes are spent on: codes, scales, low rank, outliers and exact tokens.

Bars are percent of the fp16 cache's bytes, so that datasets and lengths compare; the fp16 arm, 100%
by definition, has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from evals.drawing import COLOURS, MIB, Drawing, Record, Row, drawing, grid, panels, short, where
from evals.settings import labels
from gear.bytes import TERMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = {"lowrank": "low rank", "exact": "exact tokens"}
_BAR, _FRAME = 0.27, 1.1
"""Inches of height of a bar, and of what is around the bars of a panel."""


def bytes_by_term(records: Sequence[Record]) -> Drawing | None:
    """Draw stacked bars, one a method, one panel per model, dataset and protocol.

    None where no record but fp16's says what its bytes are.
    """
    found = {name: _bars(group) for name, group in panels(records).items()}
    found = {name: bars for name, bars in found.items() if bars}
    if not found:
        return None
    terms = list(
        dict.fromkeys(
            term for bars in found.values() for bar in bars for term, n in bar[1].items() if n
        )
    )
    ordered = [term for term in (*TERMS, "exact") if term in terms]
    colours = dict(zip([*ordered, *(t for t in terms if t not in ordered)], COLOURS, strict=False))
    figure, axes = grid(len(found), 1, (7.2, 1.0))
    heights = [_FRAME + _BAR * len(bars) for bars in found.values()]
    figure.set_figheight(sum(heights))
    axes[0, 0].get_gridspec().set_height_ratios(heights)
    for axis, (name, bars) in zip(axes.flat, found.items(), strict=True):
        _draw(axis, bars, colours)
        axis.set_title(short(name, 70), fontsize=9)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    return drawing(figure, [row for bars in found.values() for bar in bars for row in _rows(*bar)])


def _bars(records: Sequence[Record]) -> list[tuple[Row, dict[str, int]]]:
    """Return (what the bar is, bytes by term) of a panel's methods."""
    names = labels([record["config"] for record in records])
    bars = []
    for record, name in zip(records, names, strict=True):
        sizes, whole = record.get("bytes") or {}, record["metrics"].get("kv/fp16_bytes")
        if record["config"]["cache"]["name"] == "fp16" or not sizes.get("terms") or not whole:
            continue
        bar = {
            **where(record),
            "method": name,
            "fp16_bytes": whole,
            "accounting_only": bool(sizes.get("accounting_only")),
            "key": record["key"],
        }
        bars.append((bar, sizes["terms"]))
    return bars


def _rows(bar: Row, terms: dict[str, int]) -> list[Row]:
    """Return a bar's numbers, a row a term."""
    whole = bar["fp16_bytes"]
    return [
        {**bar, "term": t, "bytes": n, "pct_of_fp16": 100 * n / whole} for t, n in terms.items()
    ]


def _draw(
    axis: Axes, bars: Sequence[tuple[Row, dict[str, int]]], colours: Mapping[str, str]
) -> None:
    """Draw a panel's bars from the top, each with its sum in percent and MiB."""
    totals = []
    for place, (bar, terms) in enumerate(bars):
        left = 0.0
        for term, colour in colours.items():
            width = 100 * terms.get(term, 0) / bar["fp16_bytes"]
            label = _NAMES.get(term, term) if place == 0 else None
            axis.barh(place, width, 0.72, left=left, color=colour, label=label)
            left += width
        text = f" {left:.1f}% · {sum(terms.values()) / MIB:.2f} MiB"
        axis.text(left, place, text, va="center", fontsize=7)
        totals.append(left)
    names = [short(bar["method"]) + "*" * bar["accounting_only"] for bar, _ in bars]
    axis.set_yticks(range(len(bars)), names, fontsize=7)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xlim(0, 1.28 * max(totals) or 1)
    held = "; * accounted for, not held" if any(bar["accounting_only"] for bar, _ in bars) else ""
    axis.set_xlabel(f"stored bytes, % of fp16's{held}", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
