"""Quality against stored bytes with the Pareto front, from records.

The front joins the methods that no other one beats in both; what is beaten is drawn hollow. Up to
eight methods are named at their points, more are numbered and named in a key at the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evals.columns import frame, missing
from evals.drawing import (
    MIB,
    Drawing,
    Record,
    Row,
    as_written,
    cells,
    drawing,
    ends,
    panels,
    quiet,
    short,
    styles,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

Box = tuple[float, float, float, float]
"""Left, bottom, right, top in pixels."""

NAMED = 8
"""Points of a panel that are named where they are."""
KEYED = 60
"""The most points that have a number and a line in the key; of more only some on the front."""
_PLACES = [
    (7, 4), (7, -3), (7, -11), (-7, 4), (-7, -3), (-7, -11), (0, 9), (0, -16), (12, 14), (-12, 14),
    (12, -22), (-12, -22), (12, 24), (-12, 24), (12, -33), (-12, -33),
]  # fmt: skip
"""Offsets of a name from its point, in 1/72 inch; of those that cover least the first is taken."""


def pareto(records: Sequence[Record]) -> Drawing | None:
    """Draw quality against stored bytes (MiB), one panel per model, dataset and protocol.

    Quality is ΔNLL against fp16 in nats per token (fp16 itself at 0), a task's score, where higher
    is better, or token perplexity where neither was measured; each with its interval. A failed job
    is left out. None when no other has both numbers.
    """
    look = styles(records)
    found = {name: _points(group) for name, group in panels(records).items()}
    found = {name: points for name, points in found.items() if points}
    if not found:
        return None
    keyed = max(map(len, found.values())) > NAMED
    few = len(_all(found)) <= KEYED
    names = list(dict.fromkeys(p["method"] for p in _all(found) if few or p["on_front"]))[:KEYED]
    signs = {name: str(i) if keyed else short(name, 36) for i, name in enumerate(names, 1)}
    figure, axes = cells(len(found), (5.4, 4.2), extra=3.4 if keyed else 0.0)
    caches = {record["key"]: record["config"]["cache"]["name"] for record in records}
    for axis, (name, points) in zip(axes, found.items(), strict=True):
        _draw_front(axis, points)
        for point in points:
            _draw_point(axis, point, **look[caches[point["key"]]])
        axis.set(xlabel="stored KV cache (MiB)", ylabel=_axis_name(points))
        axis.set_title(short(name), fontsize=10)
        axis.margins(x=0.15, y=0.12)
        _scale_bytes(axis, points)
        axis.grid(alpha=0.25)
    if keyed:
        _draw_key(figure, signs, {p["method"]: look[caches[p["key"]]] for p in _all(found)})
        if not few:
            figure.suptitle("named: what no other beats; the CSV has all", fontsize=9)
    _draw_names(figure, axes, list(found.values()), signs)
    return drawing(figure, _all(found))


def _all(found: dict[str, list[Row]]) -> list[Row]:
    """Return the rows of all panels."""
    return [row for rows in found.values() for row in rows]


def _points(records: Sequence[Record]) -> list[Row]:
    """Return a panel's points: method, bytes, quality with its interval, whether on the front."""
    rows = frame(records).astype(object).to_dict("records")
    exact = {record["key"] for record in records if record["config"]["cache"]["name"] == "fp16"}
    others = [row for row in rows if row["key"] not in exact]
    wanted = (("delta_nll", others), ("score", rows), ("ppl_token", rows))
    quality = next((name for name, of in wanted if any(not missing(r[name]) for r in of)), "")
    points = []
    for row in rows if quality else ():
        if quality == "delta_nll" and row["key"] in exact and not missing(row["ppl_token"]):
            row |= {"delta_nll": 0.0, "delta_nll_low": None, "delta_nll_high": None}
        if not missing(row["stored_bytes"]) and not missing(row[quality]):
            points.append({
                **{group: row[group] for group in ("model", "dataset", "eval", "method")},
                "stored_bytes": row["stored_bytes"],
                "quality": row["metric"] if quality == "score" else quality,
                **{f"value{end}": row[quality + end] for end in ("", "_low", "_high")},
                "higher_is_better": quality == "score",
                "key": row["key"],
            })  # fmt: skip
    front = {point["key"] for point in _front(points)}
    return [{**point, "on_front": point["key"] in front} for point in points]


def _front(points: Sequence[Row]) -> list[Row]:
    """Return the points that no other one beats in bytes and quality, by bytes."""
    front: list[Row] = []
    for point in sorted(points, key=lambda point: (point["stored_bytes"], _loss(point))):
        if not front or _loss(point) < _loss(front[-1]):
            front.append(point)
    return front


def _loss(point: Row) -> float:
    """Return a point's quality with its sign such that less is better."""
    return -point["value"] if point["higher_is_better"] else point["value"]


def _axis_name(points: Sequence[Row]) -> str:
    """Return what a panel's quality is, and which way is better."""
    name, better = points[0]["quality"], points[0]["higher_is_better"]
    written = {"delta_nll": "ΔNLL (nats per token)", "ppl_token": "token perplexity"}
    return f"{written.get(name, name)}, {'higher' if better else 'lower'} is better"


def _scale_bytes(axis: Axes, points: Sequence[Row]) -> None:
    """Spread the bytes by their logarithm where fp16 would push all others to one side."""
    from matplotlib.ticker import LogLocator, NullLocator

    sizes = [point["stored_bytes"] for point in points]
    if min(sizes) > 0 and max(sizes) > 3 * min(sizes):
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(NullLocator())


def _draw_front(axis: Axes, points: Sequence[Row]) -> None:
    """Draw the Pareto front as steps."""
    front = _front(points)
    x, y = [point["stored_bytes"] / MIB for point in front], [point["value"] for point in front]
    axis.plot(x, y, color="#999999", linewidth=1, drawstyle="steps-post", zorder=0)


def _draw_point(axis: Axes, point: Row, color: str, marker: str) -> None:
    """Draw one method with its interval, hollow where another one beats it."""
    x, y = point["stored_bytes"] / MIB, point["value"]
    axis.errorbar(
        [x], [y], yerr=ends(y, point["value_low"], point["value_high"]), fmt=marker, color=color,
        markerfacecolor=color if point["on_front"] else "white", capsize=3, elinewidth=0.9,
        markersize=5.5,
    )  # fmt: skip


def _draw_key(figure: Figure, signs: dict[str, str], look: dict[str, Row]) -> None:
    """Draw which number is which method, at the right of all panels."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="", **look[name], label=f"{sign}  {short(name)}")
        for name, sign in signs.items()
    ]
    lines = int(figure.get_figheight() * 72 / 9.5)
    columns = -(-len(handles) // lines)
    figure.set_figwidth(figure.get_figwidth() + 3.4 * (columns - 1))
    figure.legend(
        handles=handles, loc="outside right upper", fontsize=6.5, frameon=False, ncols=columns
    )


def _draw_names(
    figure: Figure, axes: Sequence[Axes], panels: Sequence[Sequence[Row]], signs: dict[str, str]
) -> None:
    """Write each point's name beside it, where it covers least of the other names and points."""
    from matplotlib.patheffects import withStroke

    as_written(figure)
    with quiet():
        figure.draw_without_rendering()  # the layout is done: points have places in pixels
        for axis, points in zip(axes, panels, strict=True):
            taken = [box for point in points for box in _covered(axis, point, figure.dpi / 72)]
            for point in (p for p in points if p["method"] in signs):
                text = axis.annotate(
                    signs[point["method"]], (point["stored_bytes"] / MIB, point["value"]),
                    _PLACES[0], textcoords="offset points", fontsize=7, parse_math=False,
                    path_effects=[withStroke(linewidth=2, foreground="white")],
                )  # fmt: skip
                text.set_in_layout(False)
                taken.append(_place(text, axis, taken))


def _covered(axis: Axes, point: Row, scale: float) -> list[Box]:
    """Return the boxes of a point's mark and of its interval; ``scale`` is pixels per 1/72 inch."""
    x, y = axis.transData.transform((point["stored_bytes"] / MIB, point["value"]))
    mark = 5 * scale
    boxes: list[Box] = [(x - mark, y - mark, x + mark, y + mark)]
    if not missing(point["value_low"]) and not missing(point["value_high"]):
        low, high = (
            axis.transData.transform((point["stored_bytes"] / MIB, point[f"value_{end}"]))[1]
            for end in ("low", "high")
        )
        boxes.append((x - mark / 4, low, x + mark / 4, high))
    return boxes


def _place(text: Annotation, axis: Axes, taken: Sequence[Box]) -> Box:
    """Move a name to its best place and return the box that it takes there."""
    inside = _box(axis)
    costs: list[float] = []
    for offset in _PLACES:
        box = _moved(text, offset)
        outside = (box[2] - box[0]) * (box[3] - box[1]) - _overlap(box, inside)
        costs.append(round(sum(_overlap(box, other) for other in taken) + 2 * outside, 3))
    return _moved(text, _PLACES[costs.index(min(costs))])


def _moved(text: Annotation, offset: tuple[int, int]) -> Box:
    """Put a name at an offset from its point, on that side of it, and return its box."""
    text.set_position(offset)
    text.set_horizontalalignment(("center", "left", "right")[(offset[0] > 0) - (offset[0] < 0)])
    return _box(text)


def _box(artist: Artist) -> Box:
    """Return what an artist covers, in pixels."""
    left, bottom, right, top = artist.get_window_extent().extents
    return left, bottom, right, top


def _overlap(a: Box, b: Box) -> float:
    """Return the area that two boxes share."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(width, 0.0) * max(height, 0.0)
