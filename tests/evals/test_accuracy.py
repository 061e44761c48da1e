"""Accuracy: intervals and tests against SciPy, textbook tables, exact fractions and brute force."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, multinomial

from evals.accuracy import detectable, first_divergence, mcnemar, paired_interval, wilson


@given(st.integers(1, 400), st.floats(0, 1), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_wilson_is_scipys(n: int, share: float, confidence: float) -> None:
    right = round(share * n)
    expected = binomtest(right, n).proportion_ci(confidence, method="wilson")
    assert wilson(right, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_has_exact_ends() -> None:
    assert wilson(0, 7, 0.95)[0] == 0.0
    assert wilson(7, 7, 0.95)[1] == 1.0


@pytest.mark.parametrize(
    ("right", "n", "confidence", "message"),
    [
        (1, 0, 0.95, "n=0: expected n of 1 or more"),
        (-1, 5, 0.95, "right=-1"),
        (6, 5, 0.95, "right=6, n=5"),
        (1, 5, 95, r"eval\.confidence=95: must be in \(0, 1\)"),
    ],
)
def test_wilson_says_what_it_wants(right: int, n: int, confidence: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wilson(right, n, confidence)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_sum_of_both_tails(lost: int, gained: int) -> None:
    flips = lost + gained
    tail = sum(math.comb(flips, k) for k in range(min(lost, gained) + 1))
    expected = float(min(Fraction(1), Fraction(2 * tail, 2**flips)))
    assert mcnemar(lost, gained) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(gained, lost) == mcnemar(lost, gained)


@pytest.mark.parametrize(
    ("lost", "gained", "p"),
    [
        (0, 0, 1.0),
        (0, 5, 0.0625),
        (6, 0, 0.03125),
        (1, 7, 0.0703125),  # Bentur et al. (2009), in Fagerland et al. (2013)
        (6, 16, 0.0524788),  # Cavo et al. (2012), there too
        (86, 150, 3.716e-05),  # Agresti's approval ratings
    ],
)
def test_mcnemar_of_textbook_tables(lost: int, gained: int, p: float) -> None:
    assert mcnemar(lost, gained) == pytest.approx(p, rel=1e-4)


def test_mcnemar_refuses_counts_below_0() -> None:
    with pytest.raises(ValueError, match="lost=-1, gained=3"):
        mcnemar(-1, 3)


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        # both, lost, gained, neither; after minus before
        ((14, 0, 5, 22), 0.011, 0.226),  # Altman et al., Statistics with Confidence, table 6.2
        ((1, 7, 1, 12), -0.507, -0.026),  # Bentur et al. (2009), in Fagerland et al. (2014)
    ],
)
def test_paired_interval_of_textbook_tables(
    table: tuple[int, int, int, int], low: float, high: float
) -> None:
    assert paired_interval(*table, 0.95) == pytest.approx((low, high), abs=5e-4)


def test_paired_interval_turns_round_with_its_arms() -> None:
    low, high = paired_interval(30, 9, 4, 7, 0.9)
    assert paired_interval(30, 4, 9, 7, 0.9) == pytest.approx((-high, -low))


@given(*(st.integers(0, 50) for _ in range(4)))
def test_paired_interval_holds_the_change(both: int, lost: int, gained: int, neither: int) -> None:
    n = both + lost + gained + neither
    if n == 0:
        return
    low, high = paired_interval(both, lost, gained, neither, 0.95)
    assert -1 <= low <= (gained - lost) / n + 1e-12
    assert (gained - lost) / n - 1e-12 <= high <= 1


@pytest.mark.parametrize(
    "shares", [(0.6, 0.1, 0.1, 0.2), (0.4, 0.25, 0.05, 0.3), (0.85, 0.05, 0.02, 0.08)]
)
def test_paired_interval_covers_as_often_as_it_says(shares: tuple[float, ...]) -> None:
    n, truth = 20, shares[2] - shares[1]
    tables = np.array([t for t in product(range(n + 1), repeat=4) if sum(t) == n])
    chances = multinomial(n, shares).pmf(tables)
    covers = []
    for table in tables.tolist():
        low, high = paired_interval(*table, 0.95)
        covers.append(low <= truth <= high)
    assert 0.94 < float(chances @ np.array(covers)) <= 1.0


@pytest.mark.parametrize("table", [(0, 0, 0, 0), (1, -1, 2, 3)])
def test_paired_interval_refuses_what_is_no_table(table: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected four whole numbers"):
        paired_interval(*table, 0.95)


@pytest.mark.parametrize("confidence", [0.5, 0.75, 0.9, 0.95, 0.99, 0.999])
def test_detectable_by_brute_force(confidence: float) -> None:
    for n in (1, 2, 3, 4, 5, 6, 7, 10, 11, 20, 50):
        shown = [k / n for k in range(1, n + 1) if binomtest(0, k).pvalue <= 1 - confidence]
        assert detectable(n, confidence) == min(shown, default=math.inf)


def test_six_flips_of_200_are_the_least_at_95_percent() -> None:
    assert detectable(200, 0.95) == 0.03
    assert detectable(5, 0.95) == math.inf


@pytest.mark.parametrize(
    ("a", "b", "index"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [], 0),
        ([7], [8], 0),
    ],
)
def test_first_divergence(a: list[int], b: list[int], index: int | None) -> None:
    assert first_divergence(a, b) == index
    assert first_divergence(b, a) == index
