"""Intervals: seeded, by document, and absent where they would mean nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evals.statistics import ratio_interval

OPTIONS = {"resamples": 500, "confidence": 0.95, "seed": 0}


def test_interval_holds_the_ratio_and_repeats():
    top, bottom = [30.0, 10.0, 22.0, 18.0, 25.0], [10, 10, 10, 10, 10]
    low, high = ratio_interval(top, bottom, **OPTIONS)
    assert low < sum(top) / sum(bottom) < high
    assert ratio_interval(top, bottom, **OPTIONS) == (low, high)
    assert ratio_interval(top, bottom, **{**OPTIONS, "seed": 1}) != (low, high)


def test_interval_is_that_of_pooled_ratios_over_resampled_documents():
    top, bottom = np.array([1.0, 8.0, 3.0, 9.0]), np.array([10.0, 20.0, 10.0, 40.0])
    draws = np.random.default_rng(7).integers(0, 4, (20_000, 4))
    expected = np.percentile(top[draws].sum(1) / bottom[draws].sum(1), [5, 95])
    got = ratio_interval(top, bottom, resamples=20_000, confidence=0.9, seed=1)
    assert got == pytest.approx(tuple(expected), rel=0.02)


def test_equal_documents_give_an_interval_of_no_width():
    assert ratio_interval([2.0, 2.0, 2.0], [4, 4, 4], **OPTIONS) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("top", "bottom"),
    [([1.0], [2]), ([1.0, math.nan], [1, 1]), ([1.0, math.inf], [1, 1]), ([1.0, 2.0], [1, 0])],
)
def test_no_interval_where_there_is_none(top, bottom):
    assert ratio_interval(top, bottom, **OPTIONS) is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"confidence": 95}, "eval.confidence=95"),
        ({"confidence": 0.0}, "eval.confidence=0.0"),
        ({"resamples": 0}, "eval.bootstrap_samples=0"),
    ],
)
def test_settings_out_of_range_are_named(change, field):
    with pytest.raises(ValueError, match=field):
        ratio_interval([1.0, 2.0], [1, 1], **{**OPTIONS, **change})


def test_numerators_and_denominators_must_pair():
    with pytest.raises(ValueError, match="one denominator per numerator"):
        ratio_interval([1.0, 2.0], [1], **OPTIONS)
