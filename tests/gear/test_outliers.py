"""Outlier places follow one stable sort, whatever the ties, and the counts are the formulas."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear.outliers import filled, index_dtype, outlier_places, outliers_per_end


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    share=st.floats(0, 1),
)
def test_places_are_those_of_a_stable_sort(values: list[int], share: float) -> None:
    x = np.array(values, dtype=np.float32)
    k = outliers_per_end(len(x), share)
    if k == 0:
        return
    order = np.argsort(x, kind="stable")
    places = outlier_places(mx.array(x), k)
    expected = sorted({*order[:k].tolist(), *order[len(x) - k :].tolist()})
    assert np.array(places).tolist() == expected
    assert np.flatnonzero(np.array(filled(mx.zeros(len(x)), places, 1))).tolist() == expected


@pytest.mark.parametrize(
    ("n", "share", "k"),
    [(64, 0.02, 1), (20, 0.02, 0), (1024, 0.02, 10), (49, 0.02, 0), (50, 0.02, 1), (7, 1.0, 3)],
)
def test_count_per_end(n: int, share: float, k: int) -> None:
    assert outliers_per_end(n, share) == k


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(256, mx.uint8), (257, mx.uint16), (65536, mx.uint16), (65537, mx.uint32)],
)
def test_index_takes_the_smallest_type(length: int, dtype: mx.Dtype) -> None:
    assert index_dtype(length) == dtype
