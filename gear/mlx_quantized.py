"""mlx-lm's quantized cache with what the harness asks of every cache: bytes and read-back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from gear.bytes import CacheBytes


class MlxQuantizedCache(QuantizedKVCache):
    """`QuantizedKVCache` that reports its bytes, 16-bit scales and biases counted at 2 bytes."""

    buffered_tokens = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Take in K and V; a NaN, which mx.quantize makes a number of, becomes inf, which stays."""
        keys, values = (mx.where(mx.isnan(x), mx.inf, x) for x in (keys, values))
        return super().update_and_fetch(keys, values)

    def flush(self) -> None:
        """Do nothing: every token is quantized as it comes."""

    def reconstruct(self) -> tuple[mx.array, mx.array]:
        """Return dense K and V [batch, kv_heads, tokens, head_dim] of every token."""
        both: Any = self.keys_and_values()
        keys, values = both
        group_size, bits = self.group_size, self.bits
        return (
            mx.dequantize(*keys, group_size=group_size, bits=bits),
            mx.dequantize(*values, group_size=group_size, bits=bits),
        )

    def cache_bytes(self) -> CacheBytes:
        """Return the bytes of the tokens meant; the cache's own step slack is in ``held`` only."""
        out = CacheBytes(tokens=self.offset, tokens_compressed=self.offset)
        if self.empty():
            return out
        for side in (self.keys, self.values):
            out.held += sum(a.nbytes for a in side or ())
        meant: Any = self.keys_and_values()
        for codes, scales, biases in meant:
            out.terms["codes"] += codes.nbytes
            out.terms["scales"] += 2 * (scales.size + biases.size)
            out.fp16 += 2 * codes.size * 32 // self.bits
        out.accounted = out.terms["codes"] + out.terms["scales"]
        return out
