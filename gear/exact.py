"""mlx-lm's exact cache with what the harness asks of every cache: bytes and read-back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from gear.bytes import CacheBytes


class ExactCache(KVCache):
    """`KVCache` that reports its bytes; K and V are [batch, kv_heads, tokens, head_dim]."""

    buffered_tokens = 0

    def flush(self) -> None:
        """Do nothing: nothing is ever compressed."""

    def reconstruct(self) -> tuple[mx.array, mx.array]:
        """Return K and V of every token."""
        both: Any = self.keys_and_values()
        return both

    def cache_bytes(self) -> CacheBytes:
        """Return the bytes held; all of them are exact tokens."""
        return native_bytes(self)


def native_bytes(cache: Any) -> CacheBytes:
    """Return the bytes of one of mlx-lm's own caches: exact tokens at 2 bytes an element.

    ``KVCache`` grows in steps; only the tokens it means are counted, ``held`` is its whole array.
    """
    if cache.empty():
        return CacheBytes()
    meant = cache.keys_and_values() if isinstance(cache, KVCache) else cache.state
    size = sum(2 * a.size for a in _leaves(meant) if mx.issubdtype(a.dtype, mx.floating))
    out = CacheBytes(buffer=size, held=cache.nbytes, fp16=size, tokens=cache.size())
    out.terms["exact"] = size
    return out


def _leaves(state: object) -> list[mx.array]:
    """Return the arrays of a nested cache state."""
    if isinstance(state, mx.array):
        return [state]
    if isinstance(state, list | tuple):
        return [leaf for part in state for leaf in _leaves(part)]
    return []
