"""QJL: signs by hand in fp64, the estimator's slope and error, and what V is."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from gear import GearCache, GearConfig
from gear.methods.kivi import Kivi
from gear.methods.qjl import Qjl
from gear.rotation import sketch
from tests.gear.methods.sketched import bits_per_element, block, error, gaussian, rebuilt, slope
from tests.gear.oracle_cases import to_numpy

ROWS = pytest.mark.parametrize("orthogonal", [False, True])


@ROWS
@pytest.mark.parametrize(("head_dim", "bits"), [(64, 2), (80, 3), (128, 1)])
def test_a_keys_product_with_a_query_is_the_papers_estimate(
    head_dim: int, bits: int, orthogonal: bool
) -> None:
    k, m = gaussian(64, head_dim), bits * head_dim
    q = np.random.default_rng(1).normal(size=head_dim)
    s = to_numpy(sketch(m, head_dim, 0, orthogonal=orthogonal))
    norm = np.linalg.norm(k, axis=-1)
    expected = np.sqrt(np.pi / 2) / m * norm * (np.sign(k @ s.T) @ (s @ q))
    found = rebuilt(k, "qjl", bits, orthogonal=orthogonal) @ q
    assert found == pytest.approx(expected, abs=2e-3 * norm.max())  # the stored norm is fp16


@ROWS
@pytest.mark.parametrize(("head_dim", "bits"), [(64, 8), (128, 4)])
def test_the_slope_is_one_at_512_rows(head_dim: int, bits: int, orthogonal: bool) -> None:
    k = gaussian(1024, head_dim)
    found = rebuilt(k, "qjl", bits, orthogonal=orthogonal)
    assert slope(k, found) == pytest.approx(1.0, abs=0.05)
    # each key's share of itself, too: no key is shrunk for another's sake
    own = (found * k).sum(axis=-1) / np.square(k).sum(axis=-1)
    assert own.mean() == pytest.approx(1.0, abs=0.01)
    assert own.std() < 0.1


@ROWS
def test_it_is_unbiased_over_sketches(orthogonal: bool) -> None:
    few, q = gaussian(8, 64, seed=3), np.random.default_rng(4).normal(size=64)
    draws = np.stack(
        [rebuilt(few, "qjl", 1, sketch_seed=i, orthogonal=orthogonal) for i in range(100)]
    )
    estimates, exact = draws @ q, few @ q
    off = (estimates.mean(axis=0) - exact) / (estimates.std(axis=0) / 10)
    assert np.abs(off).max() < 4
    assert np.square(off).mean() < 2


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_error_falls_with_the_rows_and_less_of_them_do_if_orthogonal(bits: int) -> None:
    k = gaussian(512, 128)
    assert error(k, rebuilt(k, "qjl", bits)) == pytest.approx(0.571 / bits, rel=0.05)
    independent = error(k, rebuilt(k, "qjl", bits, orthogonal=False))
    assert independent == pytest.approx(1.571 / bits, rel=0.05)


def test_a_key_costs_its_signs_and_its_norm() -> None:
    held = block(gaussian(64, 128), "qjl", 2)
    assert {name: a.shape for name, a in held.arrays.items()} == {
        "codes": (1, 2, 64, 8), "norm": (1, 2, 64, 1),
    }  # fmt: skip
    assert bits_per_element(held) == 2.125
    k = gaussian(64, 64)
    k[0, 1, 7] = 0
    assert not rebuilt(k, "qjl", 2)[0, 1, 7].any()


def test_values_are_kivis_in_groups_of_32() -> None:
    x = mx.array(gaussian(64, 64).astype(np.float32))
    seen = []
    for method in (Qjl(), Kivi(GearConfig(group_size=32, n_b=64))):
        cache = GearCache(method.layers(1)[0])
        cache.update_and_fetch(x, x)
        cache.flush()
        seen.append(cache.reconstruct())
    (keys, values), (_, expected) = seen
    assert mx.array_equal(values, expected)
    assert to_numpy(keys) == pytest.approx(rebuilt(to_numpy(x), "qjl", 2))
