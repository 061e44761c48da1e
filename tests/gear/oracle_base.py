"""fp64 oracle, part 1: outlier positions, groups, stored precision and the base's grid.

Written from the formulas of GEAR (arXiv:2403.05527) in float64 NumPy, one row [heads, tokens,
head_dim] at a time. Groups are *labels*: every entry has the number of its group, so K and V,
grouped and vector, short last groups and layouts are one code path that shares nothing with the
packed implementation. It does not pack, and it is slow.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

TINY = 2.0**-14
"""Smallest normal fp16 number."""
CLIP_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)


def outlier_count(sparse_frac: float, length: int) -> int:
    """Return k, the entries kept at *each* end of a vector of ``length`` (paper order)."""
    return min(math.floor(sparse_frac * length / 2 + 0.5), length // 2)


def outlier_mask(x: Array, side: str, sparse_frac: float) -> Mask:
    """Mark the k smallest and k largest entries of each vector of x [heads, tokens, head_dim].

    K: a vector is one channel over the tokens; V: one token over one head's channels. One stable
    ascending sort decides ties: the first k and the last k of it.
    """
    axis = 1 if side == "k" else 2
    mask = np.zeros(x.shape, dtype=bool)
    k = outlier_count(sparse_frac, x.shape[axis])
    if k:
        order = np.argsort(x, axis=axis, kind="stable")
        ends = np.concatenate([order.take(range(k), axis), order.take(range(-k, 0), axis)], axis)
        np.put_along_axis(mask, ends, True, axis)
    return mask


def largest_mask(residual: Array, sparse_frac: float) -> Mask:
    """Mark the int(s·N·D) entries of largest magnitude of each head (port order)."""
    heads, tokens, head_dim = residual.shape
    mask = np.zeros((heads, tokens * head_dim), dtype=bool)
    count = int(sparse_frac * tokens * head_dim)
    order = np.argsort(-np.abs(residual.reshape(heads, -1)), axis=1, kind="stable")
    np.put_along_axis(mask, order[:, :count], True, 1)
    return mask.reshape(residual.shape)


class Groups(NamedTuple):
    """Group labels: ``of`` [heads, tokens, head_dim] -> group; ``family`` [group] -> family.

    A family is the set of groups that share one 8-bit range of scales: the D channels of one token
    group (K), the block's tokens of one channel group (V, and K of per_token).
    """

    of: Ints
    family: Ints


def make_groups(shape: tuple[int, int, int], side: str, base: str, group_size: int) -> Groups:
    """Label every entry of a block [heads, tokens, head_dim] with its group."""
    _, tokens, head_dim = shape
    head, token, channel = np.indices(shape)
    by_channel = side == "k" and base != "per_token"
    along, across, members = (token, channel, head_dim) if by_channel else (channel, token, tokens)
    if base != "vector":
        per_head = math.ceil((tokens if by_channel else head_dim) / group_size)
        family = head * per_head + along // group_size
    else:
        family = head if side == "k" else np.zeros_like(head)
    n_families = int(family.max()) + 1 if family.size else 0
    return Groups(family * members + across, np.arange(n_families * members) // max(members, 1))


class Stored(NamedTuple):
    """A term as it is held: its values, and bytes of each number (2 or 4).

    ``doubtful`` marks values so near the middle of two fp16 (or 8-bit) numbers that fp32 arithmetic
    may round them the other way.
    """

    values: Array
    width: int
    doubtful: Mask


def _stored(values: Array, wide: bool) -> Stored:
    """Round to fp16, or to fp32 where fp16 would overflow or ``wide`` says so."""
    with np.errstate(over="ignore"):
        half, up, down = (
            (values * factor).astype(np.float16) for factor in (1.0, 1 + 3e-7, 1 - 3e-7)
        )
    if wide or np.isinf(half).any():
        single = values.astype(np.float32).astype(np.float64)
        return Stored(single, 4, np.zeros(values.shape, dtype=bool))
    return Stored(half.astype(np.float64), 2, up != down)


def store_scale(scale: Array) -> Stored:
    """Store scales: fp16 unless one overflows or a nonzero one is below 2^-14."""
    size = np.abs(scale)
    return _stored(scale, bool(((size > 0) & (size < TINY)).any()))


def store_zero(zero: Array, scale: Array) -> Stored:
    """Store zeros: fp16 unless one overflows or rounding moves one by more than scale/8."""
    half = _stored(zero, False)
    return _stored(zero, bool((np.abs(half.values - zero) > np.abs(scale) / 8).any()))


def store_heads(values: Array) -> Stored:
    """Store L, R or outlier values [heads, ...]: fp16 unless one overflows or a head is tiny.

    A head is tiny when its largest magnitude is nonzero and below 2^-14.
    """
    peak = np.abs(values.reshape(values.shape[0], -1)).max(axis=1, initial=0)
    return _stored(values, bool(((peak > 0) & (peak < TINY)).any()))


def affine_codes(x: Array, scale: Array, zero: Array, levels: int) -> tuple[Array, Array]:
    """Return (codes, unrounded codes) of x on the grid zero + scale·{0..levels-1}; scale 0: 0."""
    exact = np.divide(x - zero, scale, out=np.zeros_like(x), where=scale != 0)
    return np.clip(np.rint(exact), 0, levels - 1), exact


def near_tie(exact_codes: Array, within: float | Array) -> Mask:
    """Mark codes that lie within ``within`` of the middle of two integers."""
    return np.abs(exact_codes - np.floor(exact_codes) - 0.5) < within


def store_8bit(values: Array, family: Ints, width: int | None = None) -> Stored:
    """Store numbers in 8 bits between their family's min and max; width is that of min and step.

    The text does not say when min and step leave fp16 short of overflow. Here, unless ``width``
    is given: when a nonzero step, or all of a family's values, are below 2^-14.
    """
    n_families = int(family.max()) + 1 if family.size else 0
    low, high = _extremes(values, family, n_families)
    step = (high - low) / 255
    peak = np.maximum(np.abs(low), np.abs(high))
    tiny = bool((((step > 0) & (step < TINY)) | ((peak > 0) & (peak < TINY))).any())
    pair = _stored(np.stack([low, step]), tiny if width is None else width == 4)
    low, step = pair.values[0][family], pair.values[1][family]
    codes, exact = affine_codes(values, step, low, 256)
    doubtful = np.asarray(pair.doubtful.any(axis=0))[family] | near_tie(exact, 1e-4)
    return Stored(codes * step + low, pair.width, doubtful)


def _extremes(
    x: Array, label: Ints, n_groups: int, keep: Mask | None = None
) -> tuple[Array, Array]:
    """Return min and max of each label's entries, 0 where a label has none."""
    low, high = np.full(n_groups, np.inf), np.full(n_groups, -np.inf)
    kept = np.ones(x.shape, dtype=bool) if keep is None else keep
    np.minimum.at(low, label[kept], x[kept])
    np.maximum.at(high, label[kept], x[kept])
    low[np.isinf(low)], high[np.isinf(high)] = 0.0, 0.0
    return low, high


def _mlx_grid(low: Array, high: Array, bits: int) -> tuple[Array, Array, Mask]:
    """Return the grid of ``mx.quantize``: it starts at the larger end and always holds 0.

    In fp32, since a symmetric range puts 0 half-way between two codes; there is doubt all the same.
    """
    bottom, top = low.astype(np.float32), high.astype(np.float32)
    from_low = np.abs(bottom) > np.abs(top)
    size = np.maximum((top - bottom) / np.float32(2**bits - 1), np.float32(1e-7))
    scale, edge = np.where(from_low, size, -size), np.where(from_low, bottom, top)
    steps = np.rint(edge / scale)
    fitted = np.where(steps != 0, edge / np.where(steps != 0, steps, 1), scale)
    exact = (edge / scale).astype(np.float64)
    doubt = near_tie(exact, 1e-4 + 3e-7 * np.abs(exact))
    zero = np.where(steps != 0, edge, 0)
    return fitted.astype(np.float64), zero.astype(np.float64), doubt


def group_errors(x: Array, keep: Mask, groups: Groups, bits: int, factor: float) -> Array:
    """Return each group's squared error when its range is shrunk by ``factor`` about its centre."""
    n_groups = len(groups.family)
    scale, zero = _shrunk(*_extremes(x, groups.of, n_groups, keep), bits, factor)
    codes, _ = affine_codes(x, scale[groups.of], zero[groups.of], 2**bits)
    error = (x - codes * scale[groups.of] - zero[groups.of]) ** 2
    return np.bincount(groups.of[keep], error[keep], minlength=n_groups).astype(np.float64)


def _shrunk(low: Array, high: Array, bits: int, factor: Array | float) -> tuple[Array, Array]:
    """Return scale and zero of the range [low, high] shrunk about its centre."""
    width = (high - low) * factor
    return width / (2**bits - 1), np.where(
        np.asarray(factor) == 1, low, (low + high) / 2 - width / 2
    )


def raw_grid(
    x: Array, keep: Mask, groups: Groups, bits: int, base: str, clip: bool
) -> tuple[Array, Array, Mask]:
    """Return scale, zero and doubt [group] before they are stored; only ``keep`` takes part."""
    low, high = _extremes(x, groups.of, len(groups.family), keep)
    if base == "affine_mlx":
        return _mlx_grid(low, high, bits)
    best: Array | float = 1.0
    if clip:
        errors = [group_errors(x, keep, groups, bits, f) for f in CLIP_FACTORS]
        best = np.array(CLIP_FACTORS)[np.argmin(errors, axis=0)]
    return *_shrunk(low, high, bits, best), np.zeros(low.shape, dtype=bool)
