"""TurboQuant (prod): by hand in fp64, unbiased inner products and the paper's variance."""

from __future__ import annotations

import numpy as np
import pytest

from gear.checks import SettingError
from gear.methods.turboquant_prod import TurboQuantProd
from gear.normal_levels import normal_levels
from gear.rotation import sketch
from tests.gear.methods.sketched import bits_per_element, block, error, gaussian, rebuilt, slope
from tests.gear.oracle_cases import to_numpy
from tests.gear.test_rotation import matrix


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_second_term_is_the_sketch_of_what_the_first_leaves(
    head_dim: int, orthogonal: bool
) -> None:
    x, turn, levels = gaussian(64, head_dim), matrix(head_dim), np.array(normal_levels(2))
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    y = x @ turn.T / norm * head_dim**0.5
    first = levels[np.abs(y[..., None] - levels).argmin(axis=-1)]
    rest, s = y - first, to_numpy(sketch(head_dim, head_dim, 0, orthogonal=orthogonal))
    gamma = np.linalg.norm(rest, axis=-1, keepdims=True)
    second = gamma * np.sqrt(np.pi / 2) / head_dim * np.sign(rest @ s.T) @ s
    expected = norm / head_dim**0.5 * (first + second) @ turn
    found = rebuilt(x, "turboquant_prod", 3, orthogonal=orthogonal)
    # a level or a sign at its threshold may flip with the fp16 norm, and moves its token
    same = np.abs(found - expected).max(axis=-1) < 0.01
    assert same.mean() > 0.8
    assert error(expected, found) < 0.02


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_inner_products_are_unbiased(bits: int) -> None:
    """Over vectors with one S, and over draws of S with one pair of vectors."""
    x = gaussian(1024, 128)
    assert slope(x, rebuilt(x, "turboquant_prod", bits)) == pytest.approx(1, abs=0.01)
    assert slope(x, rebuilt(x, "turboquant", bits - 1)) < 0.98  # the first term alone is not
    few, q = gaussian(8, 64, seed=3), np.random.default_rng(4).normal(size=64)
    draws = np.stack([rebuilt(few, "turboquant_prod", bits, rotation_seed=i) for i in range(100)])
    estimates, exact = draws @ q, few @ q
    off = (estimates.mean(axis=0) - exact) / (estimates.std(axis=0) / 10)
    assert np.abs(off).max() < 4
    assert np.square(off).mean() < 2


@pytest.mark.parametrize(("bits", "known"), [(2, 0.57), (3, 0.18), (4, 0.054)])
def test_the_variance_is_the_papers_and_orthogonal_rows_have_less(bits: int, known: float) -> None:
    x = gaussian(1024, 128)
    independent = error(x, rebuilt(x, "turboquant_prod", bits))
    assert independent == pytest.approx(known, rel=0.03)
    orthogonal = error(x, rebuilt(x, "turboquant_prod", bits, orthogonal=True))
    assert orthogonal / independent == pytest.approx((np.pi / 2 - 1) / (np.pi / 2), rel=0.05)


@pytest.mark.parametrize(("bits", "stored"), [(4, 4.25), (3, 3.25), (2, 2.25)])
def test_what_is_stored(bits: int, stored: float) -> None:
    held = block(gaussian(64, 128), "turboquant_prod", bits)
    assert set(held.arrays) == {"codes", "signs", "norm", "rest"}
    assert bits_per_element(held) == stored


def test_a_zero_vector_stays_zero() -> None:
    x = gaussian(64, 64)
    x[0, 1, 7] = 0
    assert not rebuilt(x, "turboquant_prod", 2)[0, 1, 7].any()


def test_the_method_takes_prod_for_k_and_mse_for_v() -> None:
    [plan] = TurboQuantProd(bits=3).plan(1)
    assert (plan["k"]["base"], plan["v"]["base"]) == ("turboquant_prod", "turboquant")
    assert plan["k"]["bits"] == plan["v"]["bits"] == 3
    with pytest.raises(SettingError, match=r"bits=1: must be an integer in \[2, 5\]"):
        TurboQuantProd(bits=1).plan(1)
