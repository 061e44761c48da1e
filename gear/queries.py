"""The last queries of a prompt, which some methods judge its keys by.

A cache that attends through a route (routing.py) meets the queries by itself. An exact prefill runs
over mlx-lm's own caches; there `watched` puts caches in their place that compute the same and note
the queries. They are taken after RoPE, times the attention's scale, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from gear.attention import Packed
from gear.routing import routed


class LastQueries:
    """The newest ``window`` queries [batch, heads, tokens, head_dim] of one layer."""

    def __init__(self, window: int, array: mx.array | None = None) -> None:
        self.window, self.array = window, array

    def see(self, queries: mx.array, scale: float) -> None:
        """Take in the queries of the next tokens."""
        if not self.window:
            return
        new = queries[:, :, -self.window :].astype(mx.float32) * scale
        if self.array is not None:
            new = mx.concatenate([self.array, new], axis=2)[:, :, -self.window :]
        self.array = mx.contiguous(new)  # a slice would keep the whole array alive

    def trim(self, n: int) -> None:
        """Forget the newest ``n`` queries."""
        if self.array is not None and n:
            left = self.array.shape[2] - n
            self.array = self.array[:, :, :left] if left > 0 else None


class _Watching(KVCache):
    """A `KVCache` whose attention notes the queries; it goes on from ``plain``."""

    def __init__(self, plain: KVCache, last: LastQueries) -> None:
        super().__init__()
        self.state = plain.state
        self.last = last

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        super().update_and_fetch(keys, values)
        return self._handles(self.last)

    def keys_and_values(self) -> Any:
        """Return handles for a layer that shares this one's K and V; its queries are its own."""
        return self._handles(None)

    def _handles(self, last: LastQueries | None) -> tuple[Packed, Packed]:
        both: Any = super().keys_and_values()
        keys, values = both

        def attend(queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
            if last is not None:
                last.see(queries, scale)
            return mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, mask=mask, sinks=sinks
            )

        return Packed(keys.shape, keys.dtype, attend), Packed(values.shape, values.dtype, attend)


@contextmanager
def watched(
    model: Any, layers: list[Any], window: int, earlier: Mapping[int, mx.array]
) -> Iterator[tuple[list[Any], dict[int, LastQueries]]]:
    """Give caches that stand for ``layers`` and, by layer, the last ``window`` queries they meet.

    ``earlier`` are those of the tokens that ``layers`` hold already. Afterwards ``layers`` hold
    what came. Layers beyond a route, and all of them with ``window`` 0, stay as they are.
    """
    if not window:
        yield layers, {}
        return
    with routed(model) as route:
        last = {i: LastQueries(window, earlier.get(i)) for i in sorted(route.layers)}
        watching = {i: _Watching(layers[i], last[i]) for i in last}
        yield [watching.get(i, layer) for i, layer in enumerate(layers)], last
        for i, cache in watching.items():
            layers[i].state = cache.state
