"""Non-uniform levels of a vector by Lloyd-Max: 1-D k-means of its entries.

levels start at mean + √3 · sd · Φ⁻¹((j + 1/2) / 2^b), the best density of levels for a normal
variable; then, ITERATIONS times: each entry to its nearest level, each level to its entries'
mean. A level without entries stays.
"""

from __future__ import annotations

from statistics import NormalDist

import mlx.core as mx

from gear.outliers import Rows
from gear.placement import release

ITERATIONS = 16


def nearest(x: mx.array, levels: mx.array) -> mx.array:
    """Return codes, uint8 like x [..., rows, cols], of the nearest of ascending levels.

    ``levels`` is [..., rows, count], or [..., 1, count] for all rows.
    """
    middles = levels[..., :-1] / 2 + levels[..., 1:] / 2
    codes = mx.zeros(x.shape, mx.uint8)
    for j in range(middles.shape[-1]):
        codes = codes + (x > middles[..., j : j + 1])
    return codes.astype(mx.uint8)


def look_up(codes: mx.array, levels: mx.array) -> mx.array:
    """Return the fp32 level of each code; shapes as in `nearest`."""
    levels = mx.broadcast_to(levels, (*codes.shape[:-1], levels.shape[-1]))
    return mx.take_along_axis(levels.astype(mx.float32), codes.astype(mx.uint32), axis=-1)


def _mean(x: mx.array, weight: mx.array, axes: tuple[int, ...]) -> mx.array:
    """Return the weighted mean over ``axes``, 0 where there is no weight."""
    total = weight.sum(axis=axes, keepdims=True)
    return (x * weight).sum(axis=axes, keepdims=True) / mx.maximum(total, 1)


def unit(x: mx.array, scale: mx.array, zero: mx.array) -> mx.array:
    """Return (x - zero) / scale, 0 where the scale is."""
    return mx.where(scale == 0, 0, (x - zero) / mx.where(scale == 0, 1, scale))


def lloyd_max(rows: Rows, x: mx.array, bits: int, *, shared: bool) -> mx.array:
    """Return ascending fp32 levels [batch, heads, rows, 2^bits] of x, shaped as ``rows.x``.

    The outliers of ``rows`` take no part. ``shared`` makes one set of levels of all rows, [batch,
    heads, 1, 2^bits].
    """
    axes, inf = ((-2, -1) if shared else (-1,)), float("inf")
    weight = rows.filled(mx.ones_like(x), 0)
    inside = weight > 0
    low = mx.where(inside, x, inf).min(axis=axes, keepdims=True)
    high = mx.where(inside, x, -inf).max(axis=axes, keepdims=True)
    empty = low > high
    low, high = mx.where(empty, 0, low), mx.where(empty, 0, high)
    mean = _mean(x - low, weight, axes) + low
    spread = mx.sqrt(3 * _mean(mx.square(x - mean), weight, axes))
    places = [NormalDist().inv_cdf((j + 0.5) / 2**bits) for j in range(2**bits)]
    levels = mx.clip(mean + spread * mx.array(places), low, high)
    for _ in range(ITERATIONS):
        codes, moved = nearest(x, levels), []
        for j in range(2**bits):
            here, level = weight * (codes == j), levels[..., j : j + 1]
            moved.append(level + _mean(x - level, here, axes))  # no entries: it stays
        levels = mx.clip(mx.concatenate(moved, axis=-1), low, high)
        release(levels)
    return levels
