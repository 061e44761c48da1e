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

from gear.bases import load_base
from gear.block import Block, product
from gear.coarse import store_grid
from gear.config import LayerSettings, SideSettings
from gear.errors import NonFiniteError
from gear.lowrank import low_rank
from gear.outliers import (
    Rows,
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
    narrowed,
    scale_needs_fp32,
    values_need_fp32,
)

_SMALL = 1 << 20
"""Entries up to which a GPU takes a block of K and one of V at once: it waits for launches."""


def _store_factor(store: Store, name: str, rows: mx.array, bits: int) -> mx.array:
    """Store L (as Lᵀ) or R, rows [batch, heads, r, n]; return the values a reader sees."""
    if bits == 16:
        return store.add(name, rows, values_need_fp32(rows))
    codes, seen = store_grid(store, name, rows, bits, axis=-1)
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
    """Store the base of rows; return what it leaves, rows - base."""
    base = load_base(settings.base)
    across = side == "k" and not base.keys_by_channel
    x = rows.swapaxes(-1, -2) if across else rows
    seen = base.store(store, Rows(x, side, places, across), settings)
    return rows - (seen.swapaxes(-1, -2) if across else seen)


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


@dataclass(frozen=True)
class _Pending:
    """A block on its way: the exact tokens, the recipe and its graph, maybe not evaluated."""

    exact: mx.array
    recipe: _Recipe
    layer: int
    graph: _Graph

    def block(self) -> Block:
        """Return the block. Errors: `NonFiniteError` where a NaN or inf is in it."""
        _evaluate(self)
        recipe, (arrays, narrow, wide, finite) = self.recipe, self.graph
        arrays = narrowed(arrays, narrow, wide)
        if not finite.item():
            raise NonFiniteError.found(self.exact, recipe.side, self.layer)
        layout = load_base(recipe.settings.base).layout(recipe.side)
        for name in arrays:
            if name not in layout or layout[name].joined is None:
                arrays[name] = arrays[name][:, :, None]
        used = arrays["right"].shape[3] if "right" in arrays else 0
        tokens, head_dim = self.exact.shape[-2:]
        return Block(recipe.side, recipe.settings, tokens, head_dim, used, 1, arrays)


def _evaluate(*pending: _Pending) -> None:
    """Evaluate the graphs of several blocks at once."""
    mx.eval([p.graph for p in pending])


def _begin(
    x: mx.array, side: str, settings: SideSettings, shared: LayerSettings, rank: int | None,
    layer: int,
) -> _Pending:  # fmt: skip
    """Return a block on its way; a large one's search is over, and what it needed freed."""
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"x: must be a non-empty [batch, heads, tokens, head_dim], got {x.shape}.")
    exact, recipe = x.astype(mx.float32), _Recipe(side, settings, shared, rank)
    search, terms = (recipe.search, recipe.terms) if on_cpu() else _compiled(recipe)
    if not load_base(settings.base).graph:
        terms = recipe.terms
    rows, places = search(exact)
    if on_cpu() or x.size > _SMALL:
        mx.eval(rows, places)
        mx.synchronize()  # what the search needed is freed before the terms are made
    return _Pending(exact, recipe, layer, terms(rows, places))


def compress(
    x: mx.array, side: str, settings: SideSettings, shared: LayerSettings, rank: int | None,
    layer: int = -1,
) -> Block:  # fmt: skip
    """Compress exact K or V x [batch, heads, tokens, head_dim] into one Block.

    ``side`` is "k" or "v"; ``rank`` the prefill or decode rank. Errors: ``ValueError`` for a wrong
    shape; `NonFiniteError` (layer, head, count) for NaN or inf in ``x``.
    """
    return _begin(x, side, settings, shared, rank, layer).block()


def compress_pair(
    keys: mx.array, values: mx.array, settings: LayerSettings, prefill: bool, layer: int = -1
) -> tuple[Block, Block]:
    """Compress exact K and V of the same tokens at their prefill or decode ranks."""
    k, v = settings.k, settings.v
    rank_k, rank_v = (k.rank, v.rank) if prefill else (k.rank_decode, v.rank_decode)
    of_k = keys, "k", k, settings, rank_k, layer
    of_v = values, "v", v, settings, rank_v, layer
    if on_cpu() or keys.size > _SMALL:  # one after the other: the peak is one side's
        return compress(*of_k), compress(*of_v)
    pending = _begin(*of_k), _begin(*of_v)
    _evaluate(*pending)
    return pending[0].block(), pending[1].block()
