"""Intervals for numbers that are averages over scored tokens.

Tokens of one document are not independent, so the unit that is resampled is the document: the
statistic is sum(numerators) / sum(denominators) over documents drawn with replacement, and the
interval is the percentile interval of its bootstrap distribution. Accuracies (Wilson, McNemar) are
in evals/accuracy.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def _ratio(numerators: np.ndarray, denominators: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the pooled ratio along ``axis``."""
    return numerators.sum(axis) / denominators.sum(axis)


def ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    resamples: int,
    confidence: float,
    seed: int,
) -> tuple[float, float] | None:
    """Return (low, high) of sum(numerators) / sum(denominators), one entry per document.

    ``None`` where no interval can be given: fewer than two documents, a value that is not finite,
    or a document with denominator 0. The same inputs and seed give the same interval. Raises
    ``ValueError`` where ``confidence`` is not in (0, 1) or ``resamples`` is below 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"eval.confidence={confidence!r}: must be in (0, 1). 95% is written 0.95.")
    if resamples < 1:
        raise ValueError(f"eval.bootstrap_samples={resamples!r}: must be at least 1.")
    data = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if data[0].shape != data[1].shape:
        raise ValueError(f"one denominator per numerator: got {data[0].shape}, {data[1].shape}.")
    if len(data[0]) < 2 or not np.isfinite(data).all() or (data[1] == 0).any():
        return None
    from scipy.stats import bootstrap  # here: importing it takes a second

    interval = bootstrap(
        data,
        _ratio,
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        rng=seed,
    ).confidence_interval
    return float(interval.low), float(interval.high)


def aggregate_interval(
    values: Sequence[Any],
    aggregate: Callable[[Sequence[Any]], float],
    *,
    resamples: int,
    confidence: float,
    seed: int,
) -> tuple[float, float] | None:
    """Return (low, high) of ``aggregate(values)``, one value per item, items drawn anew.

    ``None`` for fewer than two items, or where a drawn set has no finite aggregate. The same
    values and seed give the same interval.
    """
    if len(values) < 2:
        return None
    draw = np.random.default_rng(seed)
    drawn = draw.integers(len(values), size=(resamples, len(values)))
    found = np.array([aggregate([values[i] for i in row]) for row in drawn], np.float64)
    if not np.isfinite(found).all():
        return None
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
