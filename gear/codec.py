"""One compressed block of K or V: X ~= Quant_b(X) + L·R + S (arXiv:2403.05527, algorithm 1).

`compress` turns exact [batch, heads, tokens, head_dim] into a `Block` (block.py) of packed arrays.
Arithmetic is fp32; stored terms are fp16 by the rule of precision.py, and every step sees the
stored form of those before it: outliers, base, low rank of what the base leaves, values of S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from gear.block import TOKEN_ARRAYS, Block, product
from gear.config import LayerSettings, SideSettings
from gear.errors import NonFiniteError
from gear.lowrank import low_rank
from gear.outliers import (
    index_dtype,
    outlier_mask,
    outliers_per_end,
    outliers_per_head,
    positions,
    smallest,
)
from gear.pack import pack
from gear.placement import on_cpu, release
from gear.precision import (
    Store,
    Terms,
    grid_needs_fp32,
    narrowed,
    scale_needs_fp32,
    values_need_fp32,
    zero_needs_fp32,
)
from gear.quantize import BASES, decode, encode, step


def _store_grid(
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


def _store_ranges(
    store: Store, scale: mx.array, zero: mx.array, scale_bits: int
) -> tuple[mx.array, mx.array]:
    """Store scale and zero [batch, heads, rows, groups]; return the values a reader sees.

    8 bits: one grid per head and group index, over the rows.
    """
    if scale_bits == 16:
        scale = store.add("scale", scale, scale_needs_fp32(scale))
        return scale, store.add("zero", zero, zero_needs_fp32(zero, scale))
    codes, seen_scale = _store_grid(store, "scale", scale, 8, axis=-2)
    store.add("scale", codes.astype(mx.uint8), None)
    codes, seen_zero = _store_grid(store, "zero", zero, 8, axis=-2)
    store.add("zero", codes.astype(mx.uint8), None)
    return seen_scale, seen_zero


def _store_factor(store: Store, name: str, rows: mx.array, bits: int) -> mx.array:
    """Store L (as Lᵀ) or R, rows [batch, heads, r, n]; return the values a reader sees."""
    if bits == 16:
        return store.add(name, rows, values_need_fp32(rows))
    codes, seen = _store_grid(store, name, rows, bits, axis=-1)
    store.add(name, pack(codes, bits), None)
    return seen


def _store_outliers(store: Store, rest: mx.array, mask: mx.array, count: int, bits: int) -> None:
    """Store places and values of the ``count`` marks per vector of mask [batch, heads, ..., n].

    ``rest`` is what base + L·R leaves, so that S makes those places right.
    """
    index = positions(mask, count)
    kind = index_dtype(mask.shape[-1], flat=mask.ndim == 3)
    store.add("outlier_index", index.astype(kind), None)
    values = mx.take_along_axis(rest, index, axis=-1)
    if bits == 16:
        store.add("outlier_value", values, values_need_fp32(values))
        return
    scale = mx.abs(values).max(axis=-1, keepdims=True) / 127
    scale = store.add("outlier_scale", scale, scale_needs_fp32(scale))
    steps = mx.where(scale == 0, 0, values / mx.where(scale == 0, 1, scale))
    store.add("outlier_value", mx.clip(mx.round(steps), -127, 127).astype(mx.int8), None)


def _store_base(
    store: Store, rows: mx.array, mask: mx.array | None, side: str, settings: SideSettings
) -> mx.array:
    """Store codes, scales and zeros of rows; return what the base leaves, rows - base."""
    batch, heads, n_rows, cols = rows.shape
    vector = settings.base == "vector"
    view, view_mask = rows, mask
    if vector and side == "v":  # one group per token over the channels of all heads

        def joined(a: mx.array) -> mx.array:
            return a.swapaxes(1, 2).reshape(batch, 1, n_rows, heads * cols)

        view, view_mask = joined(rows), None if mask is None else joined(mask)
    group = view.shape[-1] if vector else settings.group_size
    ranges = BASES[settings.base](view, view_mask, group, settings.bits, settings.clip)
    scale, zero = _store_ranges(store, *ranges, settings.scale_bits)
    along = 0 if vector else group
    codes = encode(rows, scale, zero, settings.bits, along)
    if mask is not None:
        codes = mx.where(mask, 0, codes)
    store.add("codes", pack(codes, settings.bits), None)
    return rows - decode(codes, scale, zero, along)


def _store_low_rank(
    store: Store, rest: mx.array, mask: mx.array | None, side: str, settings: SideSettings,
    shared: LayerSettings, rank: int | None,
) -> mx.array:  # fmt: skip
    """Store L·R of what the base left (0 at outliers); return what both leave."""
    e = rest if mask is None else mx.where(mask, 0, rest)
    left, right = low_rank(
        e.swapaxes(-1, -2) if side == "k" else e, rank, solver=shared.solver,
        iterations=shared.iterations, seed=shared.seed, max_rank=shared.max_rank,
        energy=shared.energy, energy_threshold=shared.energy_threshold,
    )  # fmt: skip
    left = _store_factor(store, "left", left.swapaxes(-1, -2), settings.factor_bits)
    right = _store_factor(store, "right", right, settings.factor_bits)
    return rest - product(left, right, side)


_Graph = tuple[Terms, Terms, Terms, mx.array]


@dataclass(frozen=True)
class _Recipe:
    """All that the graph of a block depends on beside the tokens."""

    side: str
    settings: SideSettings
    shared: LayerSettings
    rank: int | None

    def __call__(self, exact: mx.array) -> _Graph:
        """Return the terms of fp32 ``exact``, in fp16 too, which need fp32, if all is finite."""
        store = Store()
        rows = exact.swapaxes(-1, -2) if self.side == "k" else exact
        rows, s, cols = mx.contiguous(rows), self.settings, rows.shape[-1]
        pre = self.shared.outlier_stage == "pre_quant"
        per_end = outliers_per_end(cols, s.sparse_frac) if pre else 0
        mask = outlier_mask(rows, per_end) if per_end else None
        rest = _store_base(store, rows, mask, self.side, s)
        release(rest, *store.arrays.values())
        if self.rank != 0:
            rest = _store_low_rank(store, rest, mask, self.side, s, self.shared, self.rank)
        release(rest, *store.arrays.values())
        if mask is not None:
            _store_outliers(store, rest, mask, 2 * per_end, s.outlier_bits)
        tokens, head_dim = exact.shape[-2:]
        count = 0 if pre else outliers_per_head(tokens, head_dim, s.sparse_frac)
        if count:
            flat = (rest.swapaxes(-1, -2) if self.side == "k" else rest).flatten(2)
            # stable: of equal magnitudes the first in [tokens, head_dim] order
            _store_outliers(store, flat, smallest(-mx.abs(flat), count), count, s.outlier_bits)
        # what is left of a NaN or inf is NaN or inf, and so is what overflowed on the way
        return store.arrays, store.narrow, store.wide, mx.isfinite(mx.abs(rest).max())


@lru_cache(maxsize=256)
def _compiled(recipe: _Recipe) -> Callable[[mx.array], _Graph]:
    """Return the recipe as one traced graph: on a GPU the launches of its small steps dominate."""
    return mx.compile(recipe)


def compress(
    x: mx.array, side: str, settings: SideSettings, shared: LayerSettings, rank: int | None,
    layer: int = -1,
) -> Block:  # fmt: skip
    """Compress exact K or V x [batch, heads, tokens, head_dim] into one Block.

    ``side`` is "k" or "v"; ``rank`` the prefill or decode rank. Errors: ``ValueError`` for a wrong
    shape; `NonFiniteError` (layer, head, count) for NaN or inf in ``x``.
    """
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"x: must be a non-empty [batch, heads, tokens, head_dim], got {x.shape}.")
    tokens, head_dim = x.shape[-2:]
    exact, recipe = x.astype(mx.float32), _Recipe(side, settings, shared, rank)
    make: Callable[[mx.array], _Graph] = recipe if on_cpu() else _compiled(recipe)
    arrays, narrow, wide, finite = make(exact)
    mx.eval(finite, list(arrays.values()), list(narrow.values()), list(wide.values()))
    arrays = narrowed(arrays, narrow, wide)
    if not finite.item():
        raise NonFiniteError.found(exact, side, layer)
    for name in arrays:
        if name not in TOKEN_ARRAYS:
            arrays[name] = arrays[name][:, :, None]
    used = arrays["right"].shape[3] if "right" in arrays else 0
    return Block(side, settings, tokens, head_dim, used, 1, arrays)


def compress_pair(
    keys: mx.array, values: mx.array, settings: LayerSettings, prefill: bool, layer: int = -1
) -> tuple[Block, Block]:
    """Compress exact K and V of the same tokens at their prefill or decode ranks."""
    k, v = settings.k, settings.v
    rank_k, rank_v = (k.rank, v.rank) if prefill else (k.rank_decode, v.rank_decode)
    return (
        compress(keys, "k", k, settings, rank_k, layer),
        compress(values, "v", v, settings, rank_v, layer),
    )
