"""The oracle against numbers worked out by hand: outliers, groups, precision, grids."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.gear.oracle_base import (
    affine_codes,
    largest_mask,
    make_groups,
    outlier_count,
    outlier_mask,
    raw_grid,
    store_8bit,
    store_heads,
    store_scale,
    store_zero,
)


@pytest.mark.parametrize(
    ("frac", "length", "count"),
    [
        (0.02, 20, 0), (0.02, 49, 0), (0.02, 50, 1), (0.02, 64, 1), (0.02, 149, 1),
        (0.02, 150, 2), (0.02, 1024, 10), (1.0, 4, 2), (1.0, 5, 2), (1.0, 1, 0), (0.0, 64, 0),
        (0.5, 0, 0), (0.5, 6, 2),
    ],
)  # fmt: skip
def test_outlier_count(frac: float, length: int, count: int) -> None:
    assert outlier_count(frac, length) == count


def test_outlier_positions_of_ties() -> None:
    """Sorted stably 1 1 2 2 2 is tokens 1 3 0 2 4: the smallest is token 1, the largest token 4."""
    tied = np.array([2.0, 1, 2, 1, 2]).reshape(1, 5, 1)
    assert outlier_mask(tied, "k", 0.4).ravel().tolist() == [False, True, False, False, True]
    along_channels = tied.reshape(1, 1, 5)
    assert outlier_mask(along_channels, "v", 0.4).ravel().nonzero()[0].tolist() == [1, 4]
    assert not outlier_mask(tied, "v", 0.4).any()
    everything = outlier_mask(np.array([3.0, 1, 2]).reshape(1, 3, 1), "k", 1.0)
    assert everything.ravel().tolist() == [True, True, False]  # all but the median


def test_largest_of_each_head() -> None:
    heads = np.array([[[1.0, -9], [3, 4]], [[0.0, 0], [0, 5]]])
    assert largest_mask(heads, 0.5)[0].ravel().tolist() == [False, True, False, True]
    assert largest_mask(heads, 0.25)[1].ravel().tolist() == [False, False, False, True]
    assert not largest_mask(heads, 0.24).any()  # int(0.96) = 0


def test_group_labels() -> None:
    keys = make_groups((2, 5, 3), "k", "grouped", 2)
    assert len(np.unique(keys.of)) == 2 * 3 * 3  # three token groups, the last one of one token
    assert keys.of[0, 0, 1] == keys.of[0, 1, 1] != keys.of[0, 2, 1]
    assert np.bincount(keys.family).tolist() == [3] * 6
    values = make_groups((2, 5, 3), "v", "grouped", 2)
    assert values.of[1, 4, 0] == values.of[1, 4, 1] != values.of[1, 4, 2]
    assert np.bincount(values.family).tolist() == [5] * 4
    assert len(np.unique(make_groups((2, 5, 3), "k", "vector", 2).of)) == 6
    by_token = make_groups((2, 5, 3), "k", "per_token", 2)
    assert np.array_equal(by_token.of, values.of)
    tokens = make_groups((2, 5, 3), "v", "vector", 2)
    assert tokens.of[0, 3, 0] == tokens.of[1, 3, 2] == 3
    assert np.bincount(tokens.family).tolist() == [5]
    assert make_groups((2, 0, 3), "k", "grouped", 2).family.size == 0


def test_grid_leaves_outliers_out() -> None:
    """0 1 2 6 at 2 bits: scale 2; without the 6, 2/3; a group of outliers only is 0, 0."""
    x = np.array([0.0, 1, 2, 6, 7, 8]).reshape(1, 6, 1)
    groups = make_groups((1, 6, 1), "k", "grouped", 4)
    keep = np.ones(x.shape, dtype=bool)
    scale, zero, _ = raw_grid(x, keep, groups, 2, "grouped", clip=False)
    assert scale.tolist() == [2.0, 1 / 3]
    assert zero.tolist() == [0.0, 7.0]
    keep[0, 3:] = False
    scale, zero, _ = raw_grid(x, keep, groups, 2, "grouped", clip=False)
    assert scale.tolist() == [2 / 3, 0.0]
    assert zero.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_two_to_the_bits(bits: int) -> None:
    x = np.linspace(-1, 1, 1001)
    codes, _ = affine_codes(x, np.full_like(x, 2 / (2**bits - 1)), np.full_like(x, -1), 2**bits)
    assert np.unique(codes).tolist() == list(range(2**bits))


def test_clip_shrinks_about_the_centre() -> None:
    """-1, 1 and 98 entries at ±0.6 with one bit: factor 0.6 leaves only the ends wrong."""
    x = np.array([-1.0, 1] + [-0.6, 0.6] * 49).reshape(1, 100, 1)
    groups = make_groups((1, 100, 1), "k", "grouped", 100)
    scale, zero, _ = raw_grid(x, np.ones(x.shape, bool), groups, 1, "grouped", clip=True)
    assert scale == pytest.approx([1.2])
    assert zero == pytest.approx([-0.6])


def test_stored_precision() -> None:
    assert store_scale(np.array([1 / 3])).values[0] == float(np.float16(1 / 3))
    assert store_scale(np.array([0.0, 2.0**-14])).width == 2
    assert store_scale(np.array([1.0, 2.0**-14 * 0.99])).width == 4
    assert store_scale(np.array([65_519.0])).width == 2
    assert store_scale(np.array([65_520.0])).width == 4
    assert store_zero(np.array([1000.1]), np.array([1.0])).width == 2  # moves by 0.1 <= 1/8
    assert store_zero(np.array([1000.1]), np.array([0.5])).width == 4
    assert store_zero(np.array([0.1]), np.array([0.0])).width == 4  # a constant group is exact
    assert store_zero(np.array([0.25]), np.array([0.0])).width == 2
    assert store_heads(np.array([[1.0, 1e-9], [0, 0]])).width == 2
    assert store_heads(np.array([[1.0, 1], [1e-9, 0]])).width == 4


def test_eight_bit_scales() -> None:
    """Family 0 spans 1..2.275 in steps of 0.005 (5 thousandths in fp16), family 1 is constant."""
    stored = store_8bit(np.array([1.0, 1.0126, 2.275, 4.0]), np.array([0, 0, 0, 1]))
    step = float(np.float16(0.005))
    assert stored.values == pytest.approx([1.0, 1 + 3 * step, 1 + 255 * step, 4.0])
    assert stored.width == 2


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_grid_is_that_of_mx_quantize(bits: int) -> None:
    rng = np.random.default_rng(bits)
    x = rng.normal(size=(1, 7, 64)).astype(np.float32)
    x[0, 1] += 3
    x[0, 2] = 0
    groups = make_groups((1, 7, 64), "v", "affine_mlx", 32)
    scale, zero, _ = raw_grid(x.astype(np.float64), np.ones(x.shape, bool), groups, bits,
                           "affine_mlx", clip=False)  # fmt: skip
    _, scales, biases = mx.quantize(mx.array(x), group_size=32, bits=bits)
    entries = groups.of[:, :, ::32]  # one of each group, in the layout of mx.quantize
    assert scale[entries].ravel() == pytest.approx(np.array(scales).ravel(), rel=1e-5)
    assert zero[entries].ravel() == pytest.approx(np.array(biases).ravel(), rel=1e-5)
