"""Layer by layer: a job's bytes and errors, and the error of every head of K and V.

Errors are ||X - X'|| / ||X|| of reconstruction samples, means over their windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from evals.drawing import (
    COLOURS,
    HEAT,
    MIB,
    Drawing,
    Record,
    Row,
    Samples,
    colour_scale,
    drawing,
    grid,
    panels,
    short,
    where,
)
from evals.settings import labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

JOBS = 12
"""The most jobs whose heat maps are drawn together; the numbers are of all."""
_Heads = dict[int, list[float]]


def layers(record: Record, samples: Sequence[Record]) -> Drawing | None:
    """Draw a job by layer: stored bytes before fp16's (MiB), and the mean errors of its heads.

    None where the job has neither.
    """
    kept = (record.get("bytes") or {}).get("per_layer") or []
    errors = {side: head_errors(samples, side) for side in ("k", "v")}
    errors = {side: heads for side, heads in errors.items() if heads}
    count = bool(kept) + bool(errors)
    if not count:
        return None
    figure, axes = grid(1, count, (6.4, 3.8), engine=False)  # one a job
    figure.subplots_adjust(left=0.12 / count, right=1 - 0.03 / count, bottom=0.14, top=0.9)
    if kept:
        _draw_bytes(axes[0, 0], kept)
    for (side, heads), colour in zip(errors.items(), COLOURS, strict=False):
        means = [_mean(values) for values in heads.values()]
        axes[0, -1].plot(list(heads), means, "o-", color=colour, label=side.upper())
    if errors:
        axes[0, -1].set(ylabel="relative error", ylim=(0, None))
    for axis in axes.flat:
        axis.set_xlabel("layer")
        axis.locator_params(axis="x", integer=True)
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)
    return drawing(figure, layer_rows(record, samples))


def layer_rows(record: Record, samples: Sequence[Record]) -> list[Row]:
    """Return per layer the bytes and the mean errors over windows and heads, None where absent."""
    kept = {x["layer"]: x for x in (record.get("bytes") or {}).get("per_layer") or []}
    k, v = (head_errors(samples, side) for side in ("k", "v"))
    return [
        {
            "layer": layer,
            "stored_bytes": kept.get(layer, {}).get("stored_bytes"),
            "fp16_bytes": kept.get(layer, {}).get("fp16_bytes"),
            "k_rel_err": _mean(k[layer]) if layer in k else None,
            "v_rel_err": _mean(v[layer]) if layer in v else None,
        }
        for layer in sorted({*kept, *k, *v})
    ]


def _draw_bytes(axis: Axes, kept: Sequence[Row]) -> None:
    """Draw the bytes of each layer before those of fp16."""
    edges = [layer["layer"] - 0.5 for layer in kept] + [kept[-1]["layer"] + 0.5]
    for name, colour in (("fp16", "#DDDDDD"), ("stored", COLOURS[0])):
        heights = [layer[f"{name}_bytes"] / MIB for layer in kept]
        axis.stairs(heights, edges, fill=True, color=colour, label=name)
    axis.set_ylabel("KV cache (MiB)")


def head_errors(samples: Sequence[Record], side: str) -> _Heads:
    """Return {layer: error of each head}, means over windows, of side ``k`` or ``v``."""
    found: dict[int, list[list[float]]] = {}
    for sample in samples:
        for layer in sample.get("layers", []):
            found.setdefault(layer["layer"], []).append(layer[f"{side}_rel_err"])
    return {
        layer: [_mean(head) for head in zip(*windows, strict=True)]
        for layer, windows in sorted(found.items())
    }


def _mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def errors(records: Sequence[Record], samples: Samples) -> Drawing | None:
    """Draw the error of each layer and head as heat maps, K left and V right, a row a job.

    All share one scale from 0. None where no samples have errors.
    """
    maps: list[tuple[Record, str, dict[str, _Heads]]] = []
    for group in panels(records).values():
        names = labels([record["config"] for record in group])
        for record, name in zip(group, names, strict=True):
            if record["config"]["eval"].get("task") == "reconstruction":
                own = samples(record["key"])
                maps.append((record, name, {side: head_errors(own, side) for side in ("k", "v")}))
    maps = [found for found in maps if found[2]["k"]]
    if not maps:
        return None
    figure = _draw_maps(maps[:JOBS])
    if len(maps) > JOBS:
        figure.suptitle(f"the first {JOBS} of {len(maps)} jobs; the CSV has all", fontsize=9)
    return drawing(figure, [row for found in maps for row in _rows(*found)])


def _rows(record: Record, name: str, sides: dict[str, _Heads]) -> list[Row]:
    """Return a job's errors, a row a side, layer and head."""
    return [
        {**where(record), "method": name, "side": side, "layer": layer, "head": head,
         "rel_err": value, "key": record["key"]}
        for side, heads in sides.items()
        for layer, values in heads.items()
        for head, value in enumerate(values)
    ]  # fmt: skip


def _draw_maps(maps: Sequence[tuple[Record, str, dict[str, _Heads]]]) -> Figure:
    """Return the heat maps, layers from left to right and heads from top to bottom."""
    highest = max(row["rel_err"] for found in maps for row in _rows(*found))
    several = len({tuple(where(record).values()) for record, _, _ in maps}) > 1
    figure, axes = grid(len(maps), 2, (4.6, 1.9))
    for row, (record, name, sides) in zip(axes, maps, strict=True):
        for axis, (side, heads) in zip(row, sides.items(), strict=True):
            shape = [list(head) for head in zip_longest(*heads.values(), fillvalue=float("nan"))]
            axis.imshow(
                shape, cmap=HEAT, vmin=0, vmax=highest or 1, aspect="auto", interpolation="nearest"
            )
            of = f" · {where(record)['model']} · {where(record)['dataset']}" if several else ""
            axis.set_title(f"{side.upper()} of {short(name + of)}", fontsize=8)
            _name_cells(axis, list(heads), len(shape))
    colour_scale(figure, axes, highest or 1, "relative error")
    return figure


def _name_cells(axis: Axes, layers: Sequence[int], heads: int) -> None:
    """Name layers and heads, not more than fit."""
    step, head_step = -(-len(layers) // 12), -(-heads // 8)
    axis.set_xticks(range(0, len(layers), step), [str(x) for x in layers[::step]], fontsize=7)
    axis.set_yticks(range(0, heads, head_step), [str(x) for x in range(0, heads, head_step)])
    axis.tick_params(axis="y", labelsize=7)
    axis.set_xlabel("layer", fontsize=8)
    axis.set_ylabel("head", fontsize=8)
