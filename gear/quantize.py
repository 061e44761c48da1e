"""The base Quant_b(X): asymmetric min/max codes in groups along the last axis.

    scale = (max - min) / (2^b - 1),  zero = min,  code = round((x - zero) / scale) in 0..2^b - 1

It works on `Rows` whose groups run along ``cols``: K of the grouped bases arrives transposed (a row
is one channel over the block's tokens), V as it is (a row is one token over a head's channels).
Outliers take no part in a group's range and get code 0. `min_max` and `affine_mlx` choose scale and
zero, each [batch, heads, rows, groups]; rounding, codes and storage are the same (grids.py).
"""

from __future__ import annotations

import mlx.core as mx

from gear.outliers import Rows
from gear.placement import release

_NO_SCALE = 1e-37  # a smaller scale has no finite inverse in fp32; its group is as good as constant
CLIP_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)


def _grouped(x: mx.array, group: int, fill: float) -> mx.array:
    """Split [..., cols] into [..., groups, group], the last group filled up with ``fill``."""
    short = -x.shape[-1] % group
    if short:
        x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)], constant_values=fill)
    return x.reshape(*x.shape[:-1], -1, group)


def _range(rows: Rows, group: int) -> tuple[mx.array, mx.array]:
    """Return min and max of each group without its outliers; 0 and 0 where nothing is left."""
    inf = float("inf")
    low = _grouped(rows.filled(rows.x, inf), group, inf).min(axis=-1)
    high = _grouped(rows.filled(rows.x, -inf), group, -inf).max(axis=-1)
    empty = low > high
    return mx.where(empty, 0, low), mx.where(empty, 0, high)


def _over(per_group: mx.array, x: mx.array, group: int) -> mx.array:
    """Return a value per group [..., groups] spread over the entries of x [..., cols]."""
    return mx.repeat(per_group, group, axis=-1)[..., : x.shape[-1]]


def _beside(x: mx.array, group: int, *per_group: mx.array) -> tuple[mx.array, ...]:
    """Return x and values per group in shapes that broadcast; whole groups need no copies."""
    if not group:
        return x, *per_group
    if x.shape[-1] % group:
        return x, *(_over(v, x, group) for v in per_group)
    return x.reshape(*x.shape[:-1], -1, group), *(v[..., None] for v in per_group)


def encode(x: mx.array, scale: mx.array, zero: mx.array, bits: int, group: int = 0) -> mx.array:
    """Return codes (uint8) of x by scale and zero [..., groups]; a scale of 0 gives code 0.

    ``group`` = 0 means scales that broadcast to x as they are, such as one a row.
    """
    inverse = mx.where(mx.abs(scale) < _NO_SCALE, 0, 1 / scale)
    entries, inverse, zero = _beside(x, group, inverse, zero)
    codes = mx.clip(mx.round((entries - zero) * inverse), 0, 2**bits - 1)
    return codes.astype(mx.uint8).reshape(x.shape)


def decode(codes: mx.array, scale: mx.array, zero: mx.array, group: int = 0) -> mx.array:
    """Return code * scale + zero in fp32, ``group`` as in `encode`."""
    entries, scale, zero = _beside(codes, group, scale, zero)
    return (entries.astype(mx.float32) * scale + zero).reshape(codes.shape)


def step(low: mx.array, high: mx.array, bits: int) -> mx.array:
    """Return (high - low) / (2^bits - 1); halves, because the difference itself may overflow."""
    return (high / 2 - low / 2) / ((2**bits - 1) / 2)


def _shrunk(
    rows: Rows, group: int, bits: int, low: mx.array, high: mx.array
) -> tuple[mx.array, mx.array]:
    """Shrink each range about its centre by the factor of CLIP_FACTORS with least squared error."""
    centre, half = low / 2 + high / 2, high / 2 - low / 2
    best_error, best = None, mx.ones_like(low)
    for factor in CLIP_FACTORS:
        scale, zero = half * (2 * factor / (2**bits - 1)), centre - factor * half
        codes = encode(rows.x, scale, zero, bits, group)
        miss = rows.filled(decode(codes, scale, zero, group) - rows.x, 0)
        error = _grouped(miss * miss, group, 0).sum(axis=-1)
        better = error < (error + 1 if best_error is None else best_error)
        best = mx.where(better, factor, best)
        best_error = error if best_error is None else mx.minimum(error, best_error)
        release(best, best_error)  # one candidate's temporaries at a time
    return centre - best * half, centre + best * half


def min_max(rows: Rows, group: int, bits: int, clip: bool) -> tuple[mx.array, mx.array]:
    """Return scale and zero [batch, heads, rows, groups] of the min/max bases."""
    low, high = _range(rows, group)
    if clip:
        low, high = _shrunk(rows, group, bits, low, high)
    return step(low, high, bits), low


def affine_mlx(rows: Rows, group: int, bits: int) -> tuple[mx.array, mx.array]:
    """Return scale and zero as `mx.quantize` chooses them: its grid always represents 0.

    Errors: ``ValueError`` where ``cols`` is not a multiple of ``group`` (mx.quantize refuses it).
    """
    x, outliers = rows.x, rows.places
    if x.shape[-1] % group:
        raise ValueError(
            f"gear.base='affine_mlx': {x.shape[-1]} entries along the grouped axis are not a "
            f"multiple of group_size={group}; use base=grouped, which allows a short last group."
        )
    if outliers is not None:
        low, _ = _range(rows, group)
        harmless = mx.take_along_axis(low, outliers // group, axis=-1)
        x = mx.put_along_axis(x, outliers, harmless, axis=-1)
    _, scale, zero = mx.quantize(x, group_size=group, bits=bits)
    return scale, zero
