"""BatchGearCache: rows of different lengths, as mlx-lm's batched generation feeds them.

Every row is a `GearCache` in its own coordinates: pads are cut on entry, so a row's blocks are
those it would have alone, and storage is never padded. Rows whose buffers are full are compressed
together. Only what attention sees is padded, on the left, to the longest row. On an open route the
rows attend to what they store: while each gets one token a step, together (together.py), else one
by one.
"""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache

from gear.attention import Packed
from gear.bytes import CacheBytes
from gear.cache import GearCache
from gear.codec import compress_pair
from gear.routing import Route
from gear.together import Together


def _handle(new: mx.array, rows: list[tuple[Any, Any]], spans: list[slice], tokens: int) -> Packed:
    """Return what stands for K or V of every row; ``new`` is what the call brought."""
    n = new.shape[2]

    def attention(queries: mx.array, scale: float, _mask: Any, sinks: mx.array | None) -> mx.array:
        # a row has no pads, so its mask is the plain causal one
        out = []
        for i, ((keys, _), span) in enumerate(zip(rows, spans, strict=True)):
            one, real = queries[i : i + 1, :, span], span.stop - span.start
            if real:
                one = keys.attend(one, scale, "causal" if real > 1 else None, sinks)
            out.append(mx.pad(one, [(0, 0), (0, 0), (span.start, n - span.stop), (0, 0)]))
        return mx.concatenate(out)

    return Packed((*new.shape[:2], tokens, new.shape[3]), new.dtype, attention)


def _steps(together: Together, tokens: int, new: mx.array) -> Packed:
    """Return what stands for K or V of rows that decode together."""

    def attention(queries: mx.array, scale: float, _: Any, sinks: mx.array | None) -> mx.array:
        return together.attend(queries, scale, sinks)

    return Packed((*new.shape[:2], tokens, new.shape[3]), new.dtype, attention)


class BatchGearCache(_BaseCache):
    """The cache of one layer for a batch; ``rows`` holds one `GearCache` each.

    Errors: ``ValueError`` for an empty list, or rows of different settings.
    """

    row_class: ClassVar[type[GearCache]] = GearCache
    one_pass: ClassVar[bool] = True
    """Rows whose buffers are full are compressed in one pass, not each by itself."""

    def __init__(self, rows: list[GearCache]) -> None:
        if not rows or any(r.settings != rows[0].settings for r in rows):
            raise ValueError(
                "A GEAR batch needs at least one row and the same settings in every row; "
                "make all rows' caches from one config."
            )
        self.rows = list(rows)
        self._pads = [0] * len(rows)  # left pads still to come, by row
        self._left: list[int] | None = None  # real tokens still to come, by row
        self._together: Together | None = None

    def prepare(
        self,
        *,
        left_padding: list[int] | None = None,
        lengths: list[int] | None = None,
        right_padding: list[int] | None = None,
    ) -> None:
        """Announce the pads of the next calls: on the left (empty cache), or on the right."""
        self._part()
        if left_padding is not None:
            if not self.empty():
                raise ValueError("left_padding: only an empty cache can be left-padded.")
            self._pads = list(left_padding)
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("right_padding: needs lengths, the real tokens of each row.")
            self._left = list(lengths)

    def finalize(self) -> None:
        """End the calls that `prepare` announced."""
        self._left = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append K and V [batch, kv_heads, n, head_dim] without their pads; return all K and V.

        Dense ones [batch, kv_heads, longest past + n, head_dim] are laid out for `make_mask`; on
        an open route they are `Packed` handles, and every row attends to its own tokens alone.
        """
        self._flush_together()
        n, route = keys.shape[2], self._route()
        if route is not None and self._decodes(n):
            if self._together is None:
                self._together = Together(self.rows, route.tile, (keys, values))
            self._together.append(keys, values)
            steps = partial(_steps, self._together, max(self._together.offsets))
            return steps(keys), steps(values)
        self._part()
        past = max(r.offset for r in self.rows)
        spans = [self._real(i, n) for i in range(len(self.rows))]
        before = [past - r.offset + s.start for r, s in zip(self.rows, spans, strict=True)]
        seen = [
            row.update_and_fetch(keys[i : i + 1, :, span], values[i : i + 1, :, span])
            for i, (row, span) in enumerate(zip(self.rows, spans, strict=True))
        ]
        if route is not None:
            tokens = past + n
            return _handle(keys, seen, spans, tokens), _handle(values, seen, spans, tokens)
        sides = []
        for dense in zip(*seen, strict=True):
            widths = [(b, n - s.stop) for b, s in zip(before, spans, strict=True)]
            padded = [
                mx.pad(d, [(0, 0), (0, 0), w, (0, 0)]) for d, w in zip(dense, widths, strict=True)
            ]
            sides.append(mx.concatenate(padded))
        return sides[0], sides[1]

    def _route(self) -> Route | None:
        """Return the open route, which a row that was loaded from a file takes too."""
        if self._together is not None and (route := self.rows[0].route) is not None:
            return route if route.open else None
        route = next((r.route for r in self.rows if r.route is not None and r.route.open), None)
        if route is not None:
            for row in self.rows:
                row.route = route
        return route

    def _decodes(self, n: int) -> bool:
        """Say whether this call brings one token of every row, behind its sinks."""
        if self._together is not None:
            return n == 1
        plain = n == 1 and self._left is None and not any(self._pads)
        sinks = self.rows[0].settings.n_sink
        return plain and all(r.offset > 0 and len(r.sinks) == sinks for r in self.rows)

    def _part(self) -> None:
        """Give the rows back what they hold together."""
        if self._together is not None:
            self._together.part()
            self._together = None

    def _real(self, i: int, n: int) -> slice:
        """Return which of row ``i``'s next ``n`` tokens are no pads, and count them as come."""
        skip = min(self._pads[i], n)
        real = n - skip if self._left is None else min(n - skip, self._left[i])
        self._pads[i] -= skip
        if self._left is not None:
            self._left[i] -= real
        return slice(skip, skip + real)

    def _flush_together(self) -> None:
        """Compress what is due; decode blocks of all rows that have one in a single pass."""
        settings = self.rows[0].settings
        for row in self.rows:
            if row.prefill or not self.one_pass:
                row.flush()
        while due := [r for r in self.rows if r.due_tokens]:
            taken = [r.buffer.take(settings.n_b) for r in due]
            keys, values = (mx.concatenate(list(side)) for side in zip(*taken, strict=True))
            k, v = compress_pair(keys, values, settings, prefill=False, layer=due[0].layer)
            alone = len(due) == 1
            for i, row in enumerate(due):
                row.add_blocks((k, v) if alone else (k.row(i), v.row(i)), prefill=False)

    def flush(self) -> None:
        """Compress what is due in every row."""
        self._flush_together()

    def make_mask(self, n: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        """Return the causal mask for the next ``n`` tokens, pads before each row cut off."""
        past = max(r.offset for r in self.rows)
        pads = [past - r.offset + min(p, n) for r, p in zip(self.rows, self._pads, strict=True)]
        return create_causal_mask(n, offset=past, left_padding=mx.array(pads), **kwargs)

    @property
    def offset(self) -> mx.array:
        """Position of each row's next token, [batch]; negative while left pads are to come."""
        if self._together is not None:
            return mx.array(self._together.offsets)
        return mx.array([r.offset - p for r, p in zip(self.rows, self._pads, strict=True)])

    def size(self) -> int:
        """Return the tokens of the longest row."""
        return max(r.offset for r in self.rows)

    def empty(self) -> bool:
        """Say whether no row holds a token."""
        return all(r.empty() for r in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held."""
        return sum(r.nbytes for r in self.rows)

    def cache_bytes(self) -> list[CacheBytes]:
        """Return what each row holds."""
        return [r.cache_bytes() for r in self.rows]

    def is_trimmable(self) -> bool:
        """Say that `trim` works at any point."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens of every row; return how many the longest row forgot."""
        self._part()
        return max(r.trim(n) for r in self.rows)

    def filter(self, batch_indices: Any) -> None:
        """Keep only the rows ``batch_indices`` (a list or an integer array)."""
        self._part()
        keep = np.array(batch_indices).tolist()
        self.rows = [self.rows[i] for i in keep]
        self._pads = [self._pads[i] for i in keep]
        if self._left is not None:
            self._left = [self._left[i] for i in keep]

    def extend(self, other: BatchGearCache) -> None:
        """Put the rows of ``other`` behind these."""
        if self._left is not None or other._left is not None:
            raise ValueError("extend: call finalize() first; a padded prompt is still under way.")
        self._part()
        other._part()
        self.rows += other.rows
        self._pads += other._pads

    def extract(self, idx: int) -> GearCache:
        """Return row ``idx`` as a cache of its own."""
        self._part()
        return copy.deepcopy(self.rows[idx])

    @property
    def state(self) -> list[Any]:
        """[JSON of the pads, state of each row…]."""
        self._part()
        return [json.dumps([self._pads, self._left]), *(r.state for r in self.rows)]

    @state.setter
    def state(self, state: list[Any]) -> None:
        self._pads, self._left = json.loads(state[0])
        self._together = None
        self.rows = [self.row_class.from_state(s) for s in state[1:]]

    @property
    def to_quantized(self) -> Any:
        """Refuse ``kv_bits``, as `GearCache.to_quantized` does."""
        return self.rows[0].to_quantized
