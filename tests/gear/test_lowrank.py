"""The power solver against NumPy's SVD: error, exact recovery, zero, scale, and no neighbours."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from gear.lowrank import low_rank


def _residual(n: int, d: int, decay: float, seed: int = 0) -> np.ndarray:
    """Return [2, 3, n, d] matrices with singular values decay**i."""
    rng = np.random.default_rng(seed)
    u, _ = np.linalg.qr(rng.standard_normal((2, 3, n, min(n, d))))
    v, _ = np.linalg.qr(rng.standard_normal((2, 3, d, min(n, d))))
    s = decay ** np.arange(min(n, d))
    return ((u * s) @ v.swapaxes(-1, -2)).astype(np.float32)


def _best(e: np.ndarray, rank: int) -> np.ndarray:
    s = np.linalg.svd(e.astype(np.float64), compute_uv=False)
    return np.sqrt((s[..., rank:] ** 2).sum(-1))


def _error(e: np.ndarray, left: mx.array, right: mx.array) -> np.ndarray:
    return np.linalg.norm(e - np.array(left @ right, dtype=np.float64), axis=(-1, -2))


@pytest.mark.parametrize("solver", ["power", "gram", "svd"])
@pytest.mark.parametrize(("n", "d", "rank"), [(64, 64, 2), (300, 64, 4), (20, 80, 4), (40, 64, 16)])
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.5])
def test_within_5_percent_of_the_svd(solver: str, n: int, d: int, rank: int, decay: float) -> None:
    e = _residual(n, d, decay)
    left, right = low_rank(mx.array(e), rank, solver=solver)
    assert left.shape == (2, 3, n, rank)
    assert right.shape == (2, 3, rank, d)
    # a Gram matrix in fp32 cannot see directions below sqrt(its precision) of the largest one
    floor = (2e-6 if solver == "svd" else 5e-4) * np.linalg.norm(e, axis=(-1, -2))
    assert (_error(e, left, right) <= 1.05 * _best(e, rank) + floor).all()


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e9])
def test_an_exactly_rank_r_residual_is_recovered_at_any_scale(scale: float) -> None:
    rng = np.random.default_rng(1)
    e = (rng.standard_normal((1, 2, 90, 3)) @ rng.standard_normal((1, 2, 3, 64))) * scale
    e = e.astype(np.float32)
    left, right = low_rank(mx.array(e), 4)
    assert (_error(e, left, right) < 1e-4 * np.linalg.norm(e, axis=(-1, -2))).all()


def test_both_factors_carry_the_square_root_of_the_singular_values() -> None:
    e = _residual(100, 64, 0.6)
    left, right = low_rank(mx.array(e), 4)
    s = np.linalg.svd(e, compute_uv=False)[..., :4]
    np.testing.assert_allclose(np.linalg.norm(np.array(left), axis=-2) ** 2, s, rtol=0.05)
    np.testing.assert_allclose(np.linalg.norm(np.array(right), axis=-1) ** 2, s, rtol=0.05)


def test_zero_gives_zero_and_rank_is_clamped() -> None:
    left, right = low_rank(mx.zeros((1, 2, 3, 8)), 1000)
    assert left.shape == (1, 2, 3, 3)
    assert not mx.any(left).item()
    assert not mx.any(right).item()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    e = mx.array(_residual(64, 64, 0.9))
    left, right = low_rank(e, 4)
    one, other = low_rank(e[1:], 4)
    assert mx.allclose(left[1:] @ right[1:], one @ other, atol=1e-6)


@pytest.mark.parametrize(("energy", "expected"), [("squared", 3), ("nuclear", 5)])
def test_rank_by_energy_is_the_smallest_that_reaches_the_threshold(
    energy: str, expected: int
) -> None:
    e = _residual(64, 64, 0.6)
    s = np.linalg.svd(e[0, 0].astype(np.float64), compute_uv=False)
    weight = s if energy == "nuclear" else s**2
    assert int(np.argmax(np.cumsum(weight) >= 0.9 * weight.sum())) + 1 == expected
    left, _ = low_rank(mx.array(e), None, energy=energy, energy_threshold=0.9)
    assert left.shape[-1] == expected
