"""Lloyd-Max levels of N(0, 1) against Max's table, their own conditions and known errors."""

from __future__ import annotations

import numpy as np
import pytest

from gear.normal_levels import normal_levels

MAX_1960 = {
    1: [0.7980],
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}
"""Positive levels as J. Max printed them."""
RECIPE = {
    1: [0.799],
    2: [0.455, 1.508],
    3: [0.253, 0.757, 1.336, 2.140],
    4: [0.135, 0.394, 0.664, 0.953, 1.268, 1.633, 2.082, 2.754],
}
"""The same as the design's table has them from a public port."""
ERRORS = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_are_those_of_least_error(bits: int) -> None:
    levels = np.array(normal_levels(bits))
    assert levels == pytest.approx(-levels[::-1])
    assert levels[2 ** (bits - 1) :] == pytest.approx(MAX_1960[bits], abs=6e-4)
    assert levels[2 ** (bits - 1) :] == pytest.approx(RECIPE[bits], abs=0.022)
    x = np.linspace(-9, 9, 400_001)
    weight = np.exp(-x * x / 2)
    weight /= weight.sum()
    cell = np.abs(x[:, None] - levels).argmin(axis=1)
    mass, moment = (np.bincount(cell, weight * value) for value in (1, x))
    assert moment / mass == pytest.approx(levels, abs=1e-4)
    assert (weight * (x - levels[cell]) ** 2).sum() == pytest.approx(ERRORS[bits], rel=1e-3)
