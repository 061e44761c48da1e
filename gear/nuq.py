"""Non-uniform levels of a vector by Lloyd-Max: 1-D k-means of its entries.

levels start at mean + √3 · sd · Φ⁻¹((j + 1/2) / 2^b), the best density of levels for a normal
variable; then, ITERATIONS times: each entry to its nearest level, each level to its entries'
mean. A level without entries stays. Signposts of a calibration go on till nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

import mlx.core as mx
import numpy as np

from gear.calibration import tensors
from gear.coarse import off_grid, store_ranges
from gear.outliers import Rows, outlier_places, outliers_per_end
from gear.placement import release
from gear.precision import Store
from gear.quantize import min_max

ITERATIONS = 16
_STEPS = 10_000


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


def store_unit(store: Store, rows: Rows, bits: int) -> mx.array:
    """Store scale and zero of each row without its outliers; return the rows in them.

    That is (x - zero) / scale, in [0, 1] but for rounding and outliers; 0 where the scale is.
    """
    step, low = min_max(rows, rows.x.shape[-1], bits, False)
    scale, zero = store_ranges(store, step * (2**bits - 1), low, 16)
    return mx.where(scale == 0, 0, (rows.x - zero) / mx.where(scale == 0, 1, scale))


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


def signposts(rows: mx.array, bits: int, sparse_frac: float) -> mx.array:
    """Return ascending levels [2^bits] in [0, 1] that all rows share, by the rows in their ranges.

    Each [heads, rows, cols] of ``rows`` [blocks, heads, rows, cols] stands for a block and has the
    outliers of one.
    """
    rows, per_end = mx.contiguous(rows), outliers_per_end(rows.shape[-1], sparse_frac)
    places = outlier_places(rows, per_end) if per_end else None
    own = Rows(rows, places=places)
    unit = np.clip(np.array(store_unit(Store(), own, bits)), 0, 1)
    return mx.array(_levels_of(unit[np.array(own.filled(mx.ones_like(rows), 0)) > 0], 2**bits))


def _levels_of(values: np.ndarray, count: int) -> np.ndarray:
    """Return ascending fp32 levels of many values, by Lloyd's steps from quantiles till they rest.

    The values are sorted once: those of a level lie between two of them.
    """
    ordered = np.sort(values.astype(np.float64))
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    levels = np.quantile(ordered, (np.arange(count) + 0.5) / count)
    for _ in range(_STEPS):
        edges = np.searchsorted(ordered, (levels[1:] + levels[:-1]) / 2)
        edges = np.concatenate([[0], edges, [len(ordered)]])
        members = np.diff(edges)
        means = np.diff(sums[edges]) / np.maximum(members, 1)
        moved = np.where(members > 0, means, levels)
        if np.array_equal(moved, levels):
            break
        levels = moved
    return levels.astype(np.float32)


def stored_levels(arrays: Mapping[str, mx.array], reference: str, bits: int) -> mx.array:
    """Return fp32 levels [..., rows, 2^bits] of what is stored; of the file where none are."""
    if "levels" in arrays:
        return off_grid(arrays, "levels")
    scale, zero = off_grid(arrays, "scale"), off_grid(arrays, "zero")
    if "signposts" in arrays:
        return off_grid(arrays, "signposts")[..., None, :] * scale + zero
    posts = calibrated(reference, scale.shape[1], bits)
    return posts.reshape(-1, *[1] * (scale.ndim - 3), 2**bits) * scale + zero


def calibrated(reference: str, heads: int, bits: int) -> mx.array:
    """Return a file's fp32 signposts, [2^bits] or [heads, 2^bits].

    Errors: ``ValueError`` for another shape.
    """
    found = tensors(reference).get("signposts")
    if found is None or found.shape not in ((2**bits,), (heads, 2**bits)):
        raise ValueError(
            f"calibration {reference}: signposts must be [{2**bits}] or [{heads}, {2**bits}], got "
            f"{None if found is None else found.shape}. Calibrate with this model and these bits."
        )
    return found.astype(mx.float32)
