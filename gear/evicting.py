"""EvictingCache: a layer's cache that forgets most of its prompt, by a method's choice of tokens.

One rule of time: eviction happens once, when the prefill is over: at `flush`, or at the first call
of one token behind others. The prompt's calls before it (a streaming prefill's too) see every
earlier token. All that comes after it is kept exact, so a long answer grows the cache.
K arrives after RoPE and stays as it is; ``offset`` counts every token seen, evicted ones included,
so the next token's position is right.

Heads keep different tokens, so attention runs through an open route (routing.py), which also tells
the queries to a method that judges by them. Without a route the cache is exact until the eviction
and refuses calls after it: dense K and V could only stand in for evicted tokens with wrong ones.
No batches (mlx-lm's ``merge``): generations run one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from gear.attention import Packed
from gear.bytes import CacheBytes
from gear.errors import NonFiniteError
from gear.exact_tokens import ExactTokens
from gear.kept import Kept, mask_of
from gear.methods import METHODS, load_method
from gear.queries import LastQueries

if TYPE_CHECKING:
    from gear.methods.eviction import Eviction
    from gear.routing import Route

STATE_VERSION = 1


class EvictingCache(_BaseCache):
    """The cache of layer ``layer`` for rows of equal length, whose tokens ``method`` chooses.

    K and V are [batch, kv_heads, tokens, head_dim]; their head_dims may differ.
    """

    route: Route | None = None

    def __init__(self, method: Eviction, layer: int = -1) -> None:
        self.method, self.layer = method, layer
        self.kept: Kept | None = None
        self.exact = ExactTokens()  # the whole prompt until the eviction, then what came after it
        self.queries = LastQueries(method.query_window)
        self.prefilled = False

    # -- growing ---------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append exact K and V [batch, kv_heads, n, head_dim]; return all, or handles on a route.

        Errors: ``ValueError`` without a route, once tokens were evicted.
        """
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                "K and V must be [batch, kv_heads, tokens, head_dim] with equal batch, heads and "
                f"tokens; got {keys.shape} and {values.shape}."
            )
        if keys.shape[2] == 1:
            self.flush()
        self._refuse_dense()
        self.exact.append(keys, values)
        return self._fetch(partial(self._attend, see=True), (keys, values))

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return all K and V as `update_and_fetch` does, for layers that share another one's."""
        self._refuse_dense()
        return self._fetch(self._attend, None)

    def _fetch(self, attend: Any, new: tuple[mx.array, mx.array] | None) -> tuple[Any, Any]:
        """Return the handles of K and V, or both as they are."""
        if not self._routed:
            return self.reconstruct() if new is None or not self.empty() else new
        sides = self.exact.arrays or new or self.reconstruct()
        k, v = (Packed((*a.shape[:2], self.offset, a.shape[3]), a.dtype, attend) for a in sides)
        return k, v

    @property
    def _routed(self) -> bool:
        """Whether attention comes back here."""
        return self.route is not None and self.route.open

    def _refuse_dense(self) -> None:
        """Refuse to hand out K and V that miss tokens."""
        if self.kept is not None and not self._routed:
            raise ValueError(
                f"cache={self.method.name}, layer {self.layer}: tokens were evicted, so attention "
                "must run through an open route: use gear.compressed(model, method), or "
                "gear.routing.routed(model) with gear.generation.fresh_caches. A layer that does "
                "not pass K and V on to attention as they are cannot be served."
            )

    def observe(self, queries: mx.array) -> None:
        """Take the prompt's last queries [batch, heads, n, head_dim], times the scale."""
        self.queries = LastQueries(self.queries.window)
        self.queries.see(queries, 1.0)

    @property
    def query_window(self) -> int:
        """Queries that the eviction needs; 0 = none."""
        return self.queries.window

    def flush(self) -> None:
        """End the prefill and evict, the first time that there are tokens."""
        if self.prefilled or self.empty():
            return
        keys, values = self.exact.arrays
        per_token = 2 * (keys.shape[3] + values.shape[3])
        budget = self.method.kept_tokens(keys.shape[2], per_token)
        if budget < keys.shape[2]:
            for side, x in (("k", keys), ("v", values)):
                if not mx.isfinite(x).all().item():
                    raise NonFiniteError.found(x, side, self.layer)
            chosen = self.method.choose(keys, self._grouped_queries(keys), self.layer, budget)
            self.kept, self.exact = Kept.of(keys, values, chosen), ExactTokens()
        self.queries.array = None
        self.prefilled = True

    def _grouped_queries(self, keys: mx.array) -> mx.array | None:
        """Return the queries [batch, kv_heads, heads per KV head, n, head_dim]."""
        if not self.query_window:
            return None
        if self.queries.array is None:
            raise ValueError(
                f"cache={self.method.name}, layer {self.layer}: needs the prompt's last queries to "
                "choose its tokens, and none came. Run the prompt through an open route "
                "(gear.compressed does), or hand them over with observe()."
            )
        batch, heads = keys.shape[:2]
        q = self.queries.array
        return q.reshape(batch, heads, -1, *q.shape[2:])

    # -- attention -------------------------------------------------------------------------

    def _attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None,
        see: bool = False,
    ) -> mx.array:  # fmt: skip
        """Return the attention of the newest queries [batch, heads, n, head_dim]."""
        if see and not self.prefilled:
            self.queries.see(queries, scale)
        arrays = self.exact.arrays
        if self.kept is not None:
            *kept, positions = self.kept.padded()
            new = mx.arange(self.kept.tokens, self.offset)
            positions = mx.concatenate(
                [positions, mx.broadcast_to(new, (*positions.shape[:2], new.size))], axis=2
            )
            pairs = zip(kept, arrays, strict=True)
            arrays = [mx.concatenate(list(pair), axis=2) for pair in pairs]
            if isinstance(mask, mx.array) or not self.kept.even:
                mask = mask_of(mask, positions, queries.shape, self.offset)
        keys, values = arrays
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """Return mlx-lm's causal mask for the next call, over all tokens seen."""
        return create_attention_mask(*args, offset=self.offset, **kwargs)

    # -- reading ---------------------------------------------------------------------------

    def reconstruct(self) -> tuple[mx.array, mx.array]:
        """Return K and V [batch, kv_heads, offset, head_dim], zeros for what was evicted."""
        parts = [self.kept.dense()] if self.kept is not None else []
        if self.exact.arrays:
            parts.append((self.exact.arrays[0], self.exact.arrays[1]))
        if len(parts) == 1:
            return parts[0]
        k, v = (list(side) for side in zip(*parts, strict=True))
        return mx.concatenate(k, axis=2), mx.concatenate(v, axis=2)

    @property
    def buffered_tokens(self) -> int:
        """Tokens that are exact in every head: before the eviction all, then those after it."""
        return len(self.exact)

    @property
    def offset(self) -> int:
        """Tokens seen and not trimmed: the position of the next one."""
        return (self.kept.tokens if self.kept is not None else 0) + len(self.exact)

    def size(self) -> int:
        """Return the tokens seen and not trimmed."""
        return self.offset

    def empty(self) -> bool:
        """Say whether there is no token."""
        return self.offset == 0

    def cache_bytes(self) -> CacheBytes:
        """Return what is held: K and V at 2 bytes an element (exact), positions as codes.

        ``tokens_compressed`` are the evicted tokens.
        """
        out = CacheBytes(tokens=self.offset, held=self.exact.nbytes)
        out.buffer = out.fp16 = 2 * self.exact.elements
        if self.queries.array is not None:
            out.held += self.queries.array.nbytes  # until the eviction
        if self.kept is not None:
            out.held += sum(a.nbytes for a in self.kept.arrays)
            elements = self.kept.keys.size + self.kept.values.size
            out.buffer += 2 * elements
            out.accounted = out.prefill = out.terms["codes"] = self.kept.positions.nbytes
            width = self.kept.keys.shape[1] + self.kept.values.shape[1]
            heads = sum(map(len, self.kept.lengths))
            out.fp16 += 2 * heads * self.kept.tokens * width
            out.tokens_compressed = self.kept.evicted
        out.terms["exact"] = out.buffer
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
        """Forget the last ``n`` tokens; return how many were.

        Into the prompt it forgets those kept of them; what was evicted does not come back.
        """
        n = min(n, self.offset)
        left = n - self.exact.trim(n)
        self.queries.trim(n)
        if left and self.kept is not None:
            self.kept.trim(left)
        if self.empty():
            self.kept, self.prefilled = None, False
        return n

    @property
    def state(self) -> list[Any]:
        """The whole cache as [version, JSON, arrays…], as in gear/state.py."""
        parts = (
            self.kept.arrays if self.kept is not None else [],
            self.exact.arrays,
            [self.queries.array] if self.queries.array is not None else [],
        )
        scalars = {
            "method": self.method.name, "options": self.method.saved_options(self.layer),
            "layer": self.layer, "prefilled": self.prefilled, "arrays": [len(p) for p in parts],
            "lengths": self.kept.lengths if self.kept is not None else [],
            "tokens": self.kept.tokens if self.kept is not None else 0,
        }  # fmt: skip
        return [STATE_VERSION, json.dumps(scalars), *(a for part in parts for a in part)]

    @state.setter
    def state(self, state: list[Any]) -> None:
        if state[0] != STATE_VERSION:
            raise ValueError(
                f"EvictingCache state version {state[0]!r}: this package reads {STATE_VERSION}; "
                "make the cache again with this version."
            )
        saved = json.loads(state[1])
        arrays: Iterator[mx.array] = iter(state[2:])
        kept, exact, queries = ([next(arrays) for _ in range(n)] for n in saved["arrays"])
        self.method = load_method(METHODS[saved["method"]])(**saved["options"])
        self.layer, self.prefilled = saved["layer"], saved["prefilled"]
        self.kept = None
        if kept:
            keys, values, positions = kept
            self.kept = Kept(keys, values, positions, saved["lengths"], saved["tokens"])
        self.exact = ExactTokens()
        self.exact.arrays = exact
        self.queries = LastQueries(self.method.query_window, queries[0] if queries else None)

    @property
    def to_quantized(self) -> NoReturn:
        """Refuse ``kv_bits``, which would replace this cache (a property: see `GearCache`)."""
        raise ValueError(
            f"kv_bits: a cache of cache={self.method.name} is already compressed; leave kv_bits "
            "unset."
        )
