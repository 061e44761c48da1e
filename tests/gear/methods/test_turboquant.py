"""TurboQuant (mse): codes by hand in fp64, the paper's errors, and what the rotation is for."""

from __future__ import annotations

import numpy as np
import pytest

from gear import GearConfig
from gear.checks import SettingError
from gear.methods.turboquant import TurboQuant
from gear.normal_levels import normal_levels
from tests.gear.methods.sketched import bits_per_element, block, error, gaussian, rebuilt, slope
from tests.gear.test_rotation import matrix

KNOWN = {1: 0.362, 2: 0.117, 3: 0.034, 4: 0.0094}
"""Squared error per coordinate."""


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize(("side", "head_dim"), [("k", 64), ("v", 80)])
def test_codes_are_the_nearest_levels_of_the_rotated_unit_vector(
    side: str, head_dim: int, bits: int
) -> None:
    x, turn, levels = 3 * gaussian(64, head_dim), matrix(head_dim), np.array(normal_levels(bits))
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    y = x @ turn.T / norm * head_dim**0.5
    codes = np.abs(y[..., None] - levels).argmin(axis=-1)
    found = rebuilt(x, "turboquant", bits, side)
    seen = found @ turn.T / norm * head_dim**0.5
    gaps = np.abs(y[..., None] - (levels[1:] + levels[:-1]) / 2).min(axis=-1)
    clear = gaps > 2e-3  # the stored norm is fp16
    assert clear.mean() > 0.97
    assert seen[clear] == pytest.approx(levels[codes][clear], abs=3e-3)
    assert np.abs(seen[..., None] - levels).min(axis=-1).max() < 3e-3


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_error_is_the_papers_whatever_the_vectors_are(bits: int) -> None:
    x = gaussian(1024, 128)
    assert error(x, rebuilt(x, "turboquant", bits)) == pytest.approx(KNOWN[bits], rel=0.02)
    x[..., [3, 50, 77]] *= 20  # as keys have it; what the rotation does not spread is not normal
    keys = rebuilt(x, "turboquant", bits)
    assert error(x, keys) == pytest.approx(KNOWN[bits], rel=0.25)
    assert error(1e-9 * x, rebuilt(1e-9 * x, "turboquant", bits)) == pytest.approx(
        error(x, keys), rel=1e-2
    )


def test_the_nearest_level_shrinks_inner_products() -> None:
    """By the error itself: the reason for turboquant_prod."""
    x = gaussian(1024, 128)
    for bits, known in KNOWN.items():
        assert slope(x, rebuilt(x, "turboquant", bits)) == pytest.approx(1 - known, abs=0.006)


@pytest.mark.parametrize(("bits", "stored"), [(4, 4.125), (3, 3.125), (2, 2.125)])
def test_a_norm_is_all_that_is_stored_beside_codes(bits: int, stored: float) -> None:
    held = block(gaussian(64, 128), "turboquant", bits)
    assert set(held.arrays) == {"codes", "norm"}
    assert bits_per_element(held) == stored


def test_a_zero_vector_stays_zero_and_the_seed_counts() -> None:
    x = gaussian(64, 64)
    x[0, 1, 7] = 0
    found = rebuilt(x, "turboquant", 2)
    assert not found[0, 1, 7].any()
    assert np.abs(rebuilt(x, "turboquant", 2, rotation_seed=1) - found).max() > 0.1


def test_the_method_is_the_base_alone_and_refuses_bits_without_levels() -> None:
    [plan] = TurboQuant(GearConfig(bits=7), bits=3, rotation_seed=5).plan(1)
    assert plan["k"] == plan["v"]
    assert (plan["k"]["base"], plan["k"]["bits"], plan["k"]["rank"]) == ("turboquant", 3, 0)
    assert plan["k"]["base_options"] == {"rotation_seed": 5}
    with pytest.raises(SettingError, match=r"bits=5: must be an integer in \[1, 4\]"):
        TurboQuant(bits=5).plan(1)
    with pytest.raises(SettingError, match="rotation_seed=-1"):
        TurboQuant(rotation_seed=-1).plan(1)
