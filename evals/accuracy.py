"""Right and wrong answers: intervals, the paired test, and what n items can show at all.

Wilson (1927) for one accuracy; Newcombe (1998, "Improved confidence intervals ... paired data",
method 10) for the difference of two on the same items; McNemar's exact test for their flips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist


def wilson(right: int, n: int, confidence: float) -> tuple[float, float]:
    """Return Wilson's score interval (low, high) of the share ``right / n``.

    Raises:
        ValueError: ``n`` is 0, ``right`` is not in 0..n, or ``confidence`` not in (0, 1).
    """
    if not 0 <= right <= n or n < 1:
        raise ValueError(f"right={right}, n={n}: expected n of 1 or more and right in 0..n.")
    z = _z(confidence)
    share, shrink = right / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # exact ends: rounding would leave 1e-17
    return 0.0 if right == 0 else middle - half, 1.0 if right == n else middle + half


def paired_interval(
    both: int, lost: int, gained: int, neither: int, confidence: float
) -> tuple[float, float]:
    """Return Newcombe's interval (low, high) of the change of accuracy, (gained - lost) / n.

    Of n items ``both`` were right before and after, ``lost`` only before, ``gained`` only after,
    ``neither`` never. Raises ``ValueError`` for counts below 0 or none at all.
    """
    counts = (both, lost, gained, neither)
    n = sum(counts)
    if min(counts) < 0 or n == 0:
        raise ValueError(f"counts {counts}: expected four whole numbers from 0, not all 0.")
    before, after = (both + lost) / n, (both + gained) / n
    low_before, high_before = wilson(both + lost, n, confidence)
    low_after, high_after = wilson(both + gained, n, confidence)
    phi = _correlation(both, lost, gained, neither)

    def half(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    change = (gained - lost) / n
    low = change - half(after - low_after, high_before - before)
    high = change + half(high_after - after, before - low_before)
    return max(-1.0, low), min(1.0, high)


def mcnemar(lost: int, gained: int) -> float:
    """Return the exact two-sided p of McNemar's test: are flips as likely in both directions?

    It is binomial over the items that changed, and 1 where none did. Raises ``ValueError`` for
    counts below 0.
    """
    if lost < 0 or gained < 0:
        raise ValueError(f"lost={lost}, gained={gained}: expected counts from 0.")
    if lost == gained:
        return 1.0
    from scipy.stats import binomtest  # here: importing it takes a second

    return float(binomtest(lost, lost + gained, 0.5).pvalue)


def detectable(n: int, confidence: float) -> float:
    """Return the smallest change of accuracy that ``n`` paired items could show.

    That is k / n for the fewest flips k, all in one direction, at which the exact test of
    :func:`mcnemar` reaches 2 / 2^k <= 1 - confidence: 6 flips at 0.95. Infinite where n is less
    than k: no change of so few items could be told from chance.
    """
    _z(confidence)
    flips = 1
    while 2.0 ** (1 - flips) > 1 - confidence:
        flips += 1
    return flips / n if flips <= n else math.inf


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first token in which two generations differ; None where equal.

    Where one begins with the other, that is the length of the shorter one.
    """
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def _z(confidence: float) -> float:
    """Return the normal quantile of a two-sided interval."""
    if not 0 < confidence < 1:
        raise ValueError(f"eval.confidence={confidence!r}: must be in (0, 1). 95% is written 0.95.")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _correlation(both: int, lost: int, gained: int, neither: int) -> float:
    """Return Newcombe's phi: the correlation of the pairs, moved towards 0 where it is positive."""
    product = (both + lost) * (gained + neither) * (both + gained) * (lost + neither)
    if product == 0:
        return 0.0
    excess = float(both * neither - lost * gained)
    if excess > 0:
        excess = max(0.0, excess - (both + lost + gained + neither) / 2)
    return excess / math.sqrt(product)
