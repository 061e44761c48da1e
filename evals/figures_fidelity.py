"""KL by position of the scored tokens, from the samples of perplexity jobs.

Positions are pooled in at most sixteen bins of equal width; a bin's value is the mean KL(fp16 ||
method) of its tokens over all windows, and its interval resamples documents, because the tokens of
one document are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evals.drawing import (
    COLOURS,
    LINES,
    Drawing,
    Record,
    Row,
    Samples,
    cells,
    drawing,
    panels,
    short,
    where,
)
from evals.settings import labels

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

BINS = 16
"""The most bins of positions."""
_BANDS, _LOG_RATIO = 6, 30.0
"""Lines of a panel that have a band each, and the ratio of values that calls for a log scale."""


def kl_by_position(records: Sequence[Record], samples: Samples) -> Drawing | None:
    """Draw KL (nats) against the place of the token after the prefill, a line a method.

    None where no method's samples have ``kl``. The fp16 arm, 0 everywhere, has no line.
    """
    found = {name: _lines(group, samples) for name, group in panels(records).items()}
    found = {name: lines for name, lines in found.items() if lines}
    if not found:
        return None
    figure, axes = cells(len(found), (7.6, 3.8), columns=2)
    for axis, (name, lines) in zip(axes, found.items(), strict=True):
        _draw(axis, lines)
        axis.set_title(short(name, 60), fontsize=9)
    return drawing(figure, [row for lines in found.values() for line in lines for row in line])


def _lines(records: Sequence[Record], samples: Samples) -> list[list[Row]]:
    """Return a panel's lines, each the rows of its bins."""
    names = labels([record["config"] for record in records])
    lines = []
    for record, name in zip(records, names, strict=True):
        config = record["config"]
        if config["cache"]["name"] == "fp16" or config["eval"].get("task") != "perplexity":
            continue
        if windows := [sample for sample in samples(record["key"]) if sample.get("kl")]:
            line = {**where(record), "method": name}
            lines.append([{**line, **row, "key": record["key"]} for row in _bins(config, windows)])
    return lines


def _bins(config: dict[str, Any], windows: Sequence[Record]) -> list[Row]:
    """Return mean and interval of each bin of positions, counted from 1."""
    import numpy as np

    length = max(len(window["kl"]) for window in windows)
    width = -(-length // BINS)
    documents = list(dict.fromkeys(window.get("document") for window in windows))
    shape = len(documents), -(-length // width)
    sums, counts = np.zeros(shape), np.zeros(shape)
    for window in windows:
        places = np.arange(len(window["kl"])) // width
        row = documents.index(window.get("document"))
        sums[row] += np.bincount(places, window["kl"], minlength=shape[1])
        counts[row] += np.bincount(places, minlength=shape[1])
    means = sums.sum(0) / counts.sum(0)
    low, high = _interval(config, sums, counts)
    return [
        {
            "first_token": i * width + 1,
            "last_token": min((i + 1) * width, length),
            "kl_mean": float(means[i]),
            "kl_low": low[i],
            "kl_high": high[i],
            "windows": len(windows),
        }
        for i in range(shape[1])
    ]


def _interval(
    config: dict[str, Any], sums: np.ndarray, counts: np.ndarray
) -> tuple[list[Any], list[Any]]:
    """Return the percentile bootstrap of each bin; None for one document, which has none.

    ``sums`` and ``counts`` are [documents, bins]. The same samples and seed give the same interval.
    """
    import numpy as np

    n, bins = sums.shape
    if n < 2 or not counts.all():
        return [None] * bins, [None] * bins
    settings = config["eval"]
    draw = np.random.default_rng(config.get("seed", 0))
    times = draw.multinomial(n, [1 / n] * n, size=settings.get("bootstrap_samples", 2000))
    tail = (1 - settings.get("confidence", 0.95)) / 2
    ends = np.quantile((times @ sums) / (times @ counts), [tail, 1 - tail], axis=0)
    return ends[0].tolist(), ends[1].tolist()


def _draw(axis: Axes, lines: Sequence[Sequence[Row]]) -> None:
    """Draw a panel's lines, with their intervals as bands where they are few."""
    for i, line in enumerate(lines):
        x = [(row["first_token"] + row["last_token"]) / 2 for row in line]
        colour, dashes = COLOURS[i % len(COLOURS)], LINES[i // len(COLOURS) % len(LINES)]
        axis.plot(
            x, [row["kl_mean"] for row in line], color=colour, linestyle=dashes, linewidth=1.4,
            marker=".", label=short(line[0]["method"]),
        )  # fmt: skip
        if len(lines) <= _BANDS and line[0]["kl_low"] is not None:
            band = [row["kl_low"] for row in line], [row["kl_high"] for row in line]
            axis.fill_between(x, *band, color=colour, alpha=0.15, linewidth=0)
    values = [row["kl_mean"] for line in lines for row in line]
    if min(values) > 0 and max(values) > _LOG_RATIO * min(values):
        from matplotlib.ticker import LogLocator, NullLocator

        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
    else:
        axis.set_ylim(0, None)
    axis.set(xlabel="scored token after the prefill", ylabel="KL from fp16 (nats)")
    axis.grid(alpha=0.25)
    axis.legend(
        loc="upper left",
        bbox_to_anchor=(1.02, 1.0),
        fontsize=6.5,
        frameon=False,
        borderaxespad=0,
        handlelength=3.2,
    )
