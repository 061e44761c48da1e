"""One compressed block of K or V: X ~= Quant_b(X) + L·R + S (arXiv:2403.05527, algorithm 1).

`compress` turns exact [batch, heads, tokens, head_dim] into a `Block` (block.py) of packed arrays.
Arithmetic is fp32; stored terms are fp16 by the rule of precision.py, and every step sees the
stored form of those before it: outliers, base, low rank of what the base leaves, values of S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from gear.block import TOKEN_ARRAYS, Block, product
from gear.config import LayerSettings, SideSettings
from gear.errors import NonFiniteError
from gear.lowrank import low_rank
from gear.outliers import (
    filled,
    index_dtype,
    largest_places,
    outlier_places,
    outliers_per_end,
    outliers_per_head,
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
    store.add("scale", codes, None)
    codes, seen_zero = _store_grid(store, "zero", zero, 8, axis=-2)
    store.add("zero", codes, None)
    return seen_scale, seen_zero


def _store_factor(store: Store, name: str, rows: mx.array, bits: int) -> mx.array:
    """Store L (as Lᵀ) or R, rows [batch, heads, r, n]; return the values a reader sees."""
    if bits == 16:
        return store.add(name, rows, values_need_fp32(rows))
    codes, seen = _store_grid(store, name, rows, bits, axis=-1)
    store.add(name, pack(codes, bits), None)
    return seen


def _store_outliers(store: Store, rest: mx.array, places: mx.array, bits: int) -> None:
    """Store places [batch, heads, ..., count] of rest [batch, heads, ..., n] and what stands there.

    ``rest`` is what base + L·R leaves, so that S makes those places right.
    """
    kind = index_dtype(rest.shape[-1], flat=rest.ndim == 3)
    store.add("outlier_index", places.astype(kind), None)
    values = mx.take_along_axis(rest, places, axis=-1)
    if bits == 16:
        store.add("outlier_value", values, values_need_fp32(values))
        return
    scale = mx.abs(values).max(axis=-1, keepdims=True) / 127
    scale = store.add("outlier_scale", scale, scale_needs_fp32(scale))
    steps = mx.where(scale == 0, 0, values / mx.where(scale == 0, 1, scale))
    store.add("outlier_value", mx.clip(mx.round(steps), -127, 127).astype(mx.int8), None)


def _store_base(
    store: Store, rows: mx.array, places: mx.array | None, side: str, settings: SideSettings
) -> mx.array:
    """Store codes, scales and zeros of rows; return what the base leaves, rows - base."""
    batch, heads, n_rows, cols = rows.shape
    vector = settings.base == "vector"
    view, outliers = rows, places
    if vector and side == "v":  # one group per token over the channels of all heads
        view = rows.swapaxes(1, 2).reshape(batch, 1, n_rows, heads * cols)
        if places is not None:
            first = mx.arange(0, heads * cols, cols, dtype=mx.uint32)[:, None, None]
            outliers = (places + first).swapaxes(1, 2).reshape(batch, 1, n_rows, -1)
    group = view.shape[-1] if vector else settings.group_size
    ranges = BASES[settings.base](view, outliers, group, settings.bits, settings.clip)
    scale, zero = _store_ranges(store, *ranges, settings.scale_bits)
    along = 0 if vector else group
    codes = filled(encode(rows, scale, zero, settings.bits, along), places, 0)
    store.add("codes", pack(codes, settings.bits), None)
    return rows - decode(codes, scale, zero, along)


def _store_low_rank(
    store: Store, rest: mx.array, places: mx.array | None, side: str, settings: SideSettings,
    shared: LayerSettings, rank: int | None,
) -> mx.array:  # fmt: skip
    """Store L·R of what the base left (0 at outliers); return what both leave."""
    e = filled(rest, places, 0)
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

    def search(self, exact: mx.array) -> tuple[mx.array, mx.array | None]:
        """Return fp32 ``exact`` in rows and the places of the paper's outliers in each."""
        rows = mx.contiguous(exact.swapaxes(-1, -2) if self.side == "k" else exact)
        pre = self.shared.outlier_stage == "pre_quant"
        per_end = outliers_per_end(rows.shape[-1], self.settings.sparse_frac) if pre else 0
        return rows, outlier_places(rows, per_end) if per_end else None

    def terms(self, rows: mx.array, places: mx.array | None) -> _Graph:
        """Return the terms in fp32, in fp16 too, which of them need fp32, and if all is finite."""
        store, s = Store(), self.settings
        rest = _store_base(store, rows, places, self.side, s)
        release(rest, *store.arrays.values())
        if self.rank != 0:
            rest = _store_low_rank(store, rest, places, self.side, s, self.shared, self.rank)
        release(rest, *store.arrays.values())
        if places is not None:
            _store_outliers(store, rest, places, s.outlier_bits)
        by_token = rest.swapaxes(-1, -2) if self.side == "k" else rest
        tokens, head_dim = by_token.shape[-2:]
        late = self.shared.outlier_stage == "post_lowrank"
        count = outliers_per_head(tokens, head_dim, s.sparse_frac) if late else 0
        if count:
            flat = by_token.flatten(2)
            # of equal magnitudes the first in [tokens, head_dim] order
            _store_outliers(store, flat, largest_places(flat, count), s.outlier_bits)
        # what is left of a NaN or inf is NaN or inf, and so is what overflowed on the way
        finite = mx.isfinite(rest.max()) & mx.isfinite(rest.min())
        return store.arrays, store.narrow, store.wide, finite


@lru_cache(maxsize=256)
def _compiled(recipe: _Recipe) -> tuple[Callable[..., Any], Callable[..., _Graph]]:
    """Return the recipe's two graphs traced: on a GPU the launches of small steps dominate."""
    return mx.compile(recipe.search), mx.compile(recipe.terms)


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
    search, terms = (recipe.search, recipe.terms) if on_cpu() else _compiled(recipe)
    rows, places = search(exact)
    mx.eval(rows, places)
    mx.synchronize()  # what the search needed is freed before the terms are made
    arrays, narrow, wide, finite = terms(rows, places)
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
