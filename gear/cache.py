"""GearCache: one layer's K/V cache that holds packed GEAR blocks and a short exact buffer.

One rule of time: tokens are appended exact; compression happens at the *start of the next call*
(and in `flush`), so what one call brought can be trimmed away without having shaped anything.
Tokens of a call of more than n_b become one prefill block (`rank`); otherwise the oldest n_b of the
buffer become a decode block (`rank_decode`) while it holds n_b + recent. A block is never
compressed again, and nothing keeps a dense copy of what has been compressed.
The contract is mlx-lm's (0.32): derived from `_BaseCache`, because `KVCache.merge` would silently
swap GEAR for fp16, and without an attribute called ``bits``, on which mlx-lm dispatches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from gear.attention import Packed, attend
from gear.block import Block
from gear.bytes import CacheBytes, refuse_larger_than_fp16, refuse_shape
from gear.codec import compress_pair
from gear.config import LayerSettings
from gear.exact_tokens import ExactTokens
from gear.segments import Segment, accounted_bytes
from gear.state import dump, restore

if TYPE_CHECKING:
    from gear.batch import BatchGearCache
    from gear.routing import Route


class GearCache(_BaseCache):
    """The cache of layer ``layer`` for rows of equal length, by ``settings``.

    K and V are [batch, kv_heads, tokens, head_dim]; their head_dims may differ. On an open
    ``route`` (gear/routing.py) attention runs on what is stored.
    """

    route: Route | None = None

    def __init__(self, settings: LayerSettings, layer: int = -1) -> None:
        self.settings, self.layer = settings, layer
        self.segments: list[Segment] = []
        self.sinks, self.buffer = ExactTokens(), ExactTokens()
        self.prefill = False  # the last call brought more than n_b tokens
        self.heads, self.dtype_name = 0, "float32"

    # -- growing ---------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append exact K and V [batch, kv_heads, n, head_dim]; return all K and V.

        What earlier calls brought comes back reconstructed, this call's tokens exact (but with
        ``attend=compressed`` the whole blocks of a call of more than n_b tokens reconstructed too).
        On an open route they are `Packed` handles, and nothing is reconstructed.
        """
        self._check(keys, values)
        self.flush()
        if keys.shape[2]:
            self.append(keys, values)
        return (keys, values) if self.empty() else self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return all K and V as `update_and_fetch` does, for layers that share another one's."""
        if self.route is None or not self.route.open:
            return self.reconstruct()
        return self._handle("k", self.route.tile), self._handle("v", self.route.tile)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Take in what one call brought; `flush` and the checks came before."""
        self.heads, self.dtype_name = keys.shape[1], str(keys.dtype).rpartition(".")[2]
        self.prefill = keys.shape[2] > self.settings.n_b
        n = max(self.settings.n_sink - len(self.sinks), 0)
        if n:
            self.sinks.append(keys[:, :, :n], values[:, :, :n])
            keys, values = keys[:, :, n:], values[:, :, n:]
        self.buffer.append(keys, values)
        if self.settings.attend == "compressed" and self.prefill:
            self.flush()

    def _handle(self, side: str, tile: int) -> Packed:
        """Return what stands for all of K ("k") or V."""

        def attention(queries: mx.array, *rest: Any) -> mx.array:
            return attend(queries, self, *rest, tile=tile)

        exact = self.buffer.arrays or self.sinks.arrays
        if exact:
            batch, _, _, head_dim = exact["kv".index(side)].shape
        else:
            block = getattr(self.segments[0], side)
            batch, head_dim = block.batch, block.head_dim
        shape = (batch, self.heads, self.offset, head_dim)
        return Packed(shape, getattr(mx, self.dtype_name), attention)

    def flush(self) -> None:
        """Compress what the rule of time says is due; the rest stays in the buffer."""
        while n := self.due_tokens:
            self.add_blocks(self.compress_oldest(n), prefill=self.prefill)
            self.prefill = False
        self.prefill = False

    @property
    def due_tokens(self) -> int:
        """Tokens that the rule of time would make the next block of; 0 = none."""
        s, n = self.settings, len(self.buffer)
        if self.prefill:
            return max(n - s.recent, 0) // s.n_b * s.n_b
        return s.n_b if n >= s.n_b + s.recent else 0

    def compress_oldest(self, n: int) -> tuple[Block, Block]:
        """Take the oldest ``n`` tokens out of the buffer; return them as blocks of K and V."""
        return compress_pair(*self.buffer.take(n), self.settings, self.prefill, self.layer)

    def add_blocks(self, blocks: tuple[Block, Block], *, prefill: bool) -> None:
        """Put blocks of K and V behind the compressed past."""
        k, v = blocks
        valid = k.tokens * k.count
        segment = Segment(k, v, valid=valid, grows=True, prefill=prefill)
        if self.segments and self.segments[-1].accepts(segment):
            self.segments[-1].join(segment)
        else:
            self.segments.append(segment)

    def _check(self, keys: mx.array, values: mx.array) -> None:
        """Refuse what is no K and V of one call."""
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                "K and V must be [batch, kv_heads, tokens, head_dim] with equal batch, heads and "
                f"tokens; got {keys.shape} and {values.shape}."
            )
        if not self.heads:
            self._check_cost(keys, values)

    def _check_cost(self, keys: mx.array, values: mx.array) -> None:
        """Refuse, at the first call, blocks that do not fit or would cost as much as fp16."""
        shape = keys.shape[1], keys.shape[3], values.shape[3]
        refuse_shape(self.settings, *shape[1:], self.layer)
        refuse_larger_than_fp16(self.settings, *shape, self.layer)

    # -- reading ---------------------------------------------------------------------------

    def reconstruct(self) -> tuple[mx.array, mx.array]:
        """Return dense K and V [batch, kv_heads, offset, head_dim] of every token, in order."""
        dense = [s.reconstruct(getattr(mx, self.dtype_name)) for s in self.segments]
        parts = [self.sinks.arrays, *dense, self.buffer.arrays]
        k, v = (list(side) for side in zip(*(p for p in parts if p), strict=True))
        if len(k) == 1:
            return k[0], v[0]
        return mx.concatenate(k, axis=2), mx.concatenate(v, axis=2)

    @property
    def tokens_compressed(self) -> int:
        """Tokens that are held compressed."""
        return sum(s.valid for s in self.segments)

    @property
    def buffered_tokens(self) -> int:
        """Tokens that wait in the buffer, exact (sinks not counted)."""
        return len(self.buffer)

    @property
    def offset(self) -> int:
        """Tokens seen and not trimmed: the position of the next one."""
        return len(self.sinks) + self.tokens_compressed + len(self.buffer)

    def size(self) -> int:
        """Return the tokens held."""
        return self.offset

    def empty(self) -> bool:
        """Say whether no token is held."""
        return self.offset == 0

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """Return mlx-lm's causal mask for the next call."""
        return create_attention_mask(*args, offset=self.offset, **kwargs)

    def cache_bytes(self) -> CacheBytes:
        """Return what is held, by kind and term (see gear/bytes.py)."""
        out = CacheBytes(tokens=self.offset, tokens_compressed=self.tokens_compressed)
        out.buffer = 2 * (self.sinks.elements + self.buffer.elements)
        out.terms["exact"] = out.buffer
        out.held = self.sinks.nbytes + self.buffer.nbytes
        for segment in self.segments:
            out.held += segment.nbytes
            for block in (segment.k, segment.v):
                size = accounted_bytes(block, self.settings.outlier_stage, self.heads)
                out.accounted += size
                if segment.prefill:
                    out.prefill += size
                else:
                    out.generated += size
                for term, held in block.terms().items():
                    out.terms[term] += held
                out.fp16 += 2 * block.batch * self.heads * segment.valid * block.head_dim
        out.fp16 += out.buffer
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held."""
        return self.cache_bytes().held

    # -- shrinking, saving -----------------------------------------------------------------

    def is_trimmable(self) -> bool:
        """Say that `trim` works at any point."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens; return how many were. The buffer goes first."""
        n = min(n, self.offset)
        left = n - self.buffer.trim(n)
        while left and self.segments:
            left -= self.segments[-1].trim(left)
            if self.segments[-1].valid == 0:
                self.segments.pop()
        self.sinks.trim(left)
        return n

    @property
    def state(self) -> list[Any]:
        """The whole cache as [version, JSON, arrays…] (see gear/state.py)."""
        return dump(self)

    @state.setter
    def state(self, state: list[Any]) -> None:
        restore(self, state)

    @classmethod
    def merge(cls, caches: list[GearCache]) -> BatchGearCache:
        """Return one batched cache whose rows are ``caches`` (empty ones too)."""
        from gear.batch import BatchGearCache

        return BatchGearCache(caches)

    @property
    def to_quantized(self) -> NoReturn:
        """Refuse ``kv_bits``, which would replace GEAR.

        A property, because mlx-lm looks the name up at every call but would call it only from
        ``quantized_kv_start`` (5000) tokens on.
        """
        raise ValueError(
            "kv_bits: a GEAR cache is already compressed; leave kv_bits unset, or set gear.bits."
        )
