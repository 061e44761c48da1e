"""RaBitQ: by hand in fp64, the estimate unbiased, and the grid against an exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest

from gear.methods.rabitq import Rabitq, RabitqExtended
from tests.gear.methods.sketched import bits_per_element, block, error, gaussian, rebuilt, slope
from tests.gear.test_rotation import matrix


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_one_bit_is_the_papers_estimate(side: str, head_dim: int) -> None:
    """<ō, q> / <ō, o> with ō the signs' unit vector, scaled by |x - c| and put on <c, q>."""
    x, turn = 2 + gaussian(64, head_dim), matrix(head_dim)
    q = np.random.default_rng(1).normal(size=head_dim)
    centre = x.mean(axis=2, keepdims=True)
    norm = np.linalg.norm(x - centre, axis=-1)
    o = (x - centre) / norm[..., None]
    o_bar = np.sign(o @ turn.T) @ turn / head_dim**0.5
    expected = centre @ q + norm * (o_bar @ q) / (o_bar * o).sum(axis=-1)
    found = rebuilt(x, "rabitq", 1, side) @ q
    near = np.abs(found - expected) < 5e-3 * norm  # a sign at 0 may flip with the fp16 centre
    assert near.mean() > 0.95


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_the_estimate_is_unbiased(bits: int) -> None:
    """It has the whole of x's own direction, by construction, and nothing else on average."""
    x = gaussian(1024, 128)
    found = rebuilt(x, "rabitq", bits)
    assert slope(x, found) == pytest.approx(1, abs=0.01)
    away = x - x.mean(axis=2, keepdims=True)
    own = ((found - x) * away).sum(axis=-1) / np.square(away).sum(axis=-1)
    assert np.abs(own).max() < 3e-3
    few, q = gaussian(8, 64, seed=3), np.random.default_rng(4).normal(size=64)
    draws = np.stack([rebuilt(few, "rabitq", bits, rotation_seed=i) for i in range(100)])
    estimates, exact = draws @ q, few @ q
    off = (estimates.mean(axis=0) - exact) / (estimates.std(axis=0) / 10 + 1e-3)
    assert np.abs(off).max() < 4


@pytest.mark.parametrize(
    ("bits", "known"), [(1, np.pi / 2 - 1), (2, 0.131), (3, 0.036), (4, 0.0100)]
)
def test_the_error_and_what_centring_takes_from_it(bits: int, known: float) -> None:
    """One bit has π/2 - 1; more have 1 / cos² - 1 of the best grid point."""
    x = gaussian(1024, 128)
    plain = rebuilt(x, "rabitq", bits)
    assert error(x, plain) == pytest.approx(known, rel=0.03)
    level = 100 * np.random.default_rng(5).normal(size=(1, 2, 1, 128))
    moved = rebuilt(x + level, "rabitq", bits)
    assert error(x, moved - level) == pytest.approx(known, rel=0.05)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_grid_point_is_nearly_the_best_in_angle(bits: int) -> None:
    x, turn, half = gaussian(64, 64, seed=7), matrix(64), 2 ** (bits - 1)
    found = rebuilt(x, "rabitq", bits) - x.mean(axis=2, keepdims=True)
    away = x - x.mean(axis=2, keepdims=True)
    u = (away @ turn.T)[0].reshape(-1, 64)
    best = np.zeros(len(u))
    for step in np.linspace(0.05, 4, 800):
        g = np.clip(np.floor(u / step), -half, half - 1) + 0.5
        cosine = (g * u).sum(axis=-1) / np.linalg.norm(g, axis=-1) / np.linalg.norm(u, axis=-1)
        best = np.maximum(best, cosine)
    seen = (found * away).sum(axis=-1) / np.linalg.norm(found, axis=-1)
    seen = (seen / np.linalg.norm(away, axis=-1)).reshape(-1)
    assert (seen <= best + 1e-3).all()
    assert (1 - seen).mean() < 1.05 * (1 - best).mean()


def test_what_is_stored_and_vectors_that_are_all_centre() -> None:
    held = block(gaussian(64, 128), "rabitq", 1)
    assert set(held.arrays) == {"codes", "factor", "centre"}
    assert bits_per_element(held) == 1 + 16 / 128 + 16 / 64
    x = np.full((1, 2, 64, 64), 1000.3)
    assert rebuilt(x, "rabitq", 1) == pytest.approx(x, rel=5e-6)


def test_the_methods_sides() -> None:
    [plan] = Rabitq().plan(1)
    assert [plan[side]["base"] for side in "kv"] == ["rabitq", "grouped"]
    assert [plan[side]["bits"] for side in "kv"] == [1, 2]
    [plan] = RabitqExtended(bits=3).plan(1)
    assert plan["k"] == plan["v"]
    assert (plan["k"]["base"], plan["k"]["bits"]) == ("rabitq", 3)
