"""Attention over a GEAR cache as it is stored: no dense K or V of the past, no [L, S] scores.

The tokens come in runs: sinks and buffer exact, segments packed. Each run gives a `Partial`, a
softmax that is not yet divided; partials merge by the running softmax (Milakov and Gimelshein,
arXiv:1805.02867), so all runs share one softmax. Few queries multiply with the codes as they lie
(packed.py) or, on a GPU, go through one fused kernel (decode_kernel.py); many queries unpack a
tile of tokens at a time (tiles.py). Arithmetic is fp32; queries are
[batch, kv_heads, heads per KV head, L, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from gear import decode_kernel, packed
from gear.block import Block
from gear.decode_kernel import Partial
from gear.exact_tokens import ExactTokens
from gear.placement import on_cpu, release, traced
from gear.tiles import tiles

if TYPE_CHECKING:
    from gear.cache import GearCache
    from gear.segments import Segment

TILE_TOKENS = 1024
_MOST_PACKED_ROWS = 8  # query rows a KV head up to which packed products beat unpacking a tile
_MOST_SCORES = {True: 1 << 22, False: 1 << 24}
"""Scores held at a time, on a CPU or not; more queries take turns."""
LOWEST = -3e38


@dataclass(frozen=True)
class Packed:
    """What stands for K or V of a whole cache on its way through a model's attention."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    attend: Callable[[mx.array, float, mx.array | str | None, mx.array | None], mx.array]
    """Takes queries [batch, heads, L, head_dim], scale, mask and sinks; returns the output."""

    @property
    def ndim(self) -> int:
        """Return the number of axes, as an array would."""
        return len(self.shape)

    def astype(self, dtype: mx.Dtype) -> Packed:
        """Return the handle as of another dtype; the arithmetic is fp32 in any case."""
        return replace(self, dtype=dtype)


@dataclass(frozen=True)
class _Run:
    """Tokens ``start`` to ``stop``; ``partial`` takes fp32 queries and the mask of these tokens.

    A ``large`` one is evaluated before the next is met, or all that was unpacked would be held.
    """

    start: int
    stop: int
    partial: Callable[[mx.array, mx.array | None], Partial]
    large: bool


@dataclass(frozen=True)
class _Mask:
    """A mask as mlx-lm gives it, read a tile at a time; query 0 stands at token ``past``."""

    mask: mx.array | str | None
    past: int
    kv_heads: int

    def hides(self, run: _Run, span: slice) -> bool:
        """Say whether no query of ``span`` sees a token of ``run``."""
        return isinstance(self.mask, str) and run.start > self.past + span.stop - 1

    def tile(self, run: _Run, span: slice) -> mx.array | None:
        """Return ``span`` against ``run``; it broadcasts to [batch, kv_heads, group, L, tokens]."""
        if self.mask is None:
            return None
        if isinstance(self.mask, str):
            if run.stop <= self.past + span.start + 1:
                return None
            seen_by = mx.arange(self.past + span.start, self.past + span.stop)[:, None]
            return mx.arange(run.start, run.stop) <= seen_by
        rows = slice(None) if self.mask.shape[-2] == 1 else span
        part = self.mask[..., rows, run.start : run.stop]
        part = part.reshape(*[1] * (4 - part.ndim), *part.shape)
        if part.shape[1] == 1:
            return part[:, :, None]
        return part.reshape(part.shape[0], self.kv_heads, -1, *part.shape[2:])


def attend(
    queries: mx.array,
    cache: GearCache,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    tile: int = TILE_TOKENS,
) -> mx.array:
    """Return softmax(scale·q·Kᵀ + mask)·V [batch, heads, L, head_dim] over all of ``cache``.

    ``queries`` [batch, heads, L, head_dim] are the newest L tokens. ``mask`` is "causal", None, or
    a boolean or additive array that broadcasts to [batch, heads, L, tokens]; ``sinks`` [heads] are
    logits that only take weight. ``tile`` is the number of tokens unpacked at a time.
    """
    batch, heads, length, head_dim = queries.shape
    most_scores = _MOST_SCORES[on_cpu()]
    if not cache.segments and batch * heads * length * cache.offset <= most_scores:
        keys, values = cache.reconstruct()  # all of it is exact
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    shape = (batch, cache.heads, heads // cache.heads, length, head_dim)
    q = (queries.astype(mx.float32) * scale).reshape(shape)
    see = _Mask(mask, cache.offset - length, cache.heads)
    turn = max(most_scores // (batch * heads * tile), 1)
    spans = [slice(i, min(i + turn, length)) for i in range(0, length, turn)]
    few = shape[2] * length <= _MOST_PACKED_ROWS
    totals: list[Partial | None] = [None] * len(spans)
    alone = length == 1 and not isinstance(mask, mx.array)  # one query that sees every token
    for run in _runs(cache, q if alone else None, few, tile):
        for i, span in enumerate(spans):
            if not see.hides(run, span):
                totals[i] = merged(totals[i], run.partial(q[..., span, :], see.tile(run, span)))
                if run.large:
                    mx.eval(totals[i])
    # every query sees itself at least, so there is a total for each
    out = mx.concatenate([divided(t, sinks) for t in totals if t is not None], axis=3)
    return out.reshape(batch, heads, length, -1).astype(queries.dtype)


def _runs(cache: GearCache, query: mx.array | None, few: bool, tile: int) -> Iterator[_Run]:
    """Yield the tokens of ``cache`` in order: exact ones in tiles, packed ones as they suit best.

    ``query`` is one that sees every token, which the fused kernel can take; ``few`` says that
    there are few enough for packed products.
    """
    start = 0
    for part in (cache.sinks, *cache.segments, cache.buffer):
        exact = isinstance(part, ExactTokens)
        found = _exact(part, tile, not few) if exact else pieces(part, query, few, tile)
        for count, attention, large in found:
            yield _Run(start, start + count, attention, large)
            start += count


_Pieces = Iterator[tuple[int, Callable[[mx.array, mx.array | None], Partial], bool]]
"""Tokens, what takes fp32 queries and their mask to a partial, and whether it is large."""


def pieces(segment: Segment, query: mx.array | None, few: bool, tile: int) -> _Pieces:
    """Yield a segment's tokens in order, as they are attended to best; arguments as of `_runs`."""
    if query is not None and decode_kernel.usable(query.flatten(1, 2), segment.k, segment.v):
        yield segment.valid, partial(_fused_partial, segment), not few
    elif few and packed.fits(segment):
        yield segment.valid, partial(_packed_partial, segment), not few
    else:
        yield from _unpacked(segment, tile)


def _exact(tokens: ExactTokens, tile: int, large: bool) -> _Pieces:
    """Yield exact K and V in tiles."""
    for start in range(0, len(tokens), tile):
        keys, values = (a[:, :, start : start + tile] for a in tokens.arrays)
        yield keys.shape[2], partial(dense_partial, keys, values), large


def _unpacked(segment: Segment, tile: int) -> _Pieces:
    """Yield a segment in tiles that are reconstructed when they are met."""
    for k, v, meant in tiles(segment, tile):
        keys, values = (_reconstruction(type(b), *b.kind)(b.arrays)[:, :, :meant] for b in (k, v))
        yield meant, partial(dense_partial, keys, values), True


@lru_cache(maxsize=256)
def _reconstruction(
    make: Callable[..., Block], *kind: Any
) -> Callable[[dict[str, mx.array]], mx.array]:
    """Return what reconstructs the arrays of blocks of one kind: there are many equal tiles."""
    *fields, spare = kind
    return traced(lambda arrays: make(*fields, arrays, spare).reconstruct())


@traced
def dense_partial(
    keys: mx.array, values: mx.array, queries: mx.array, mask: mx.array | None
) -> Partial:
    """Return the partial of K and V [batch, kv_heads, tokens, head_dim]."""
    q = queries.flatten(2, 3)
    scores = q @ keys.astype(mx.float32).swapaxes(-1, -2)
    peak, weights, weight = _softmax(scores.reshape(*queries.shape[:4], -1), mask)
    out = weights.flatten(2, 3) @ values.astype(mx.float32)
    return out.reshape(*queries.shape[:4], -1), peak, weight


def _fused_partial(segment: Segment, queries: mx.array, _mask: mx.array | None) -> Partial:
    """Return the partial of a whole segment by the fused kernel, for one query that sees it all."""
    q, valid = queries.flatten(1, 2), segment.valid
    out, peak, weight = decode_kernel.partial(q, segment.k, segment.v, valid)
    shape = queries.shape[:4]
    return out.reshape(*shape, -1), peak.reshape(*shape, 1), weight.reshape(*shape, 1)


def _packed_partial(segment: Segment, queries: mx.array, mask: mx.array | None) -> Partial:
    """Return the partial of a whole segment, K and V packed."""
    k, v, valid = segment.k, segment.v, segment.valid
    scores = packed.scores(queries.flatten(2, 3), k)[..., :valid]
    peak, weights, weight = _softmax(scores.reshape(*queries.shape[:4], -1), mask)
    release(peak, weights, weight)  # what K took is freed before V takes as much
    weights = mx.pad(weights.flatten(2, 3), [(0, 0)] * 3 + [(0, segment.tokens - valid)])
    return packed.output(weights, v).reshape(*queries.shape[:4], -1), peak, weight


def _softmax(scores: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array, mx.array]:
    """Return peak, exp(scores - peak) and its sum over the last axis, masked scores left out."""
    if mask is not None:
        bias = mx.where(mask, 0, LOWEST) if mask.dtype == mx.bool_ else mask
        scores = mx.maximum(scores + bias, LOWEST)  # -inf alone in a row would give NaN
    peak = scores.max(axis=-1, keepdims=True)
    weights = mx.exp(scores - peak)
    return peak, weights, weights.sum(axis=-1, keepdims=True)


@traced
def merged(old: Partial | None, new: Partial) -> Partial:
    """Return the partial of both token runs."""
    if old is None:
        return new
    peak = mx.maximum(old[1], new[1])
    a, b = mx.exp(old[1] - peak), mx.exp(new[1] - peak)
    return old[0] * a + new[0] * b, peak, old[2] * a + new[2] * b


@traced
def divided(total: Partial, sinks: mx.array | None) -> mx.array:
    """Return the attention output; ``sinks`` are logits that take weight and give nothing."""
    out, peak, weight = total
    if sinks is None:
        return out / weight
    logit = sinks.astype(mx.float32).reshape(1, *out.shape[1:3], 1, 1)
    most = mx.maximum(peak, logit)
    shrink = mx.exp(peak - most)
    return out * shrink / (weight * shrink + mx.exp(logit - most))
