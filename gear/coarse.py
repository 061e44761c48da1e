"""Numbers stored in few bits on a grid of their own: scales and zeros, L and R.

``NAME`` then holds codes and ``NAME_grid`` [..., 2] the step and the lowest value of each grid.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from gear.precision import Store, grid_needs_fp32, scale_needs_fp32, zero_needs_fp32
from gear.quantize import decode, encode, step


def store_grid(
    store: Store, name: str, x: mx.array, bits: int, axis: int
) -> tuple[mx.array, mx.array]:
    """Store x's grid over ``axis`` as ``name``_grid; return codes and the values they mean."""
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    scale = step(low, high, bits)
    wide = grid_needs_fp32(scale, low)
    grid = store.add(f"{name}_grid", mx.stack([scale, low], axis=-1), wide[..., None])
    scale, low = grid[..., 0], grid[..., 1]
    codes = encode(x, scale, low, bits)
    return codes, decode(codes, scale, low)


def store_ranges(
    store: Store, scale: mx.array, zero: mx.array, scale_bits: int
) -> tuple[mx.array, mx.array]:
    """Store scale and zero [batch, heads, rows, groups]; return the values a reader sees.

    8 bits: one grid per head and group index, over the rows.
    """
    if scale_bits == 16:
        scale = store.add("scale", scale, scale_needs_fp32(scale))
        return scale, store.add("zero", zero, zero_needs_fp32(zero, scale))
    codes, seen_scale = store_grid(store, "scale", scale, 8, axis=-2)
    store.add("scale", codes, None)
    codes, seen_zero = store_grid(store, "zero", zero, 8, axis=-2)
    store.add("zero", codes, None)
    return seen_scale, seen_zero


def off_grid(arrays: Mapping[str, mx.array], name: str) -> mx.array:
    """Return ``name`` as fp32, off its grid if it has one; its codes must not be packed."""
    value = arrays[name].astype(mx.float32)
    if f"{name}_grid" not in arrays:
        return value
    grid = arrays[f"{name}_grid"].astype(mx.float32)
    return value * grid[..., 0] + grid[..., 1]
