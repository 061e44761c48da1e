"""AgeTieredCache: a `GearCache` whose blocks lose bits as they get older.

A block is of the tier of its youngest token, whose age is the number of tokens since. When it is
formed it gets that tier's bits at once (a long prompt's oldest tokens never see 8 bits); later, at
the start of a call, a block that passed a bound is re-quantized from its stored codes: the exact
tokens are gone. Blocks have n_b tokens each, base alone. Trimming makes nothing younger again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import mlx.core as mx

from gear.batch import BatchGearCache
from gear.block import Block
from gear.cache import GearCache
from gear.codec import compress_pair
from gear.config import LayerSettings
from gear.segments import Segment
from gear.state import dump, restore

Tiers = tuple[tuple[int, int], ...]
"""(age from which on, bits), youngest first; the first age is 0."""


class AgeTieredCache(GearCache):
    """The cache of one layer; ``settings`` has the youngest tier's bits."""

    def __init__(self, settings: LayerSettings, layer: int, tiers: Tiers) -> None:
        super().__init__(settings, layer)
        self.tiers = tiers

    def flush(self) -> None:
        """Compress what the rule of time says is due, then take bits from what has aged."""
        while n := self.due_tokens:
            held = self.offset
            for count, bits in self._runs(held - len(self.buffer), n, n, held):
                tokens = self.buffer.take(count * self.settings.n_b)
                self._put(self._segment(*self._blocks(*tokens, bits), prefill=self.prefill))
            self.prefill = False
        self.prefill = False
        self._age()

    def _runs(self, start: int, tokens: int, valid: int, held: int) -> Iterator[tuple[int, int]]:
        """Yield runs of blocks that belong to one tier: how many, and their bits.

        The blocks cover ``tokens`` from ``start`` on, of which ``valid`` are meant; ``held`` is
        the cache's offset.
        """
        n_b = self.settings.n_b
        ends = (start + min(end, valid) for end in range(n_b, tokens + 1, n_b))
        wanted = ([b for age, b in self.tiers if held - end >= age][-1] for end in ends)
        for bits, run in groupby(wanted):
            yield len(list(run)), bits

    def _blocks(self, keys: mx.array, values: mx.array, bits: int) -> tuple[Block, Block]:
        """Compress K and V of whole blocks to ``bits``, as blocks of n_b tokens."""
        s, n_b = self.settings, self.settings.n_b
        at_bits = replace(s, k=replace(s.k, bits=bits), v=replace(s.v, bits=bits))
        k, v = compress_pair(keys, values, at_bits, False, self.layer)
        # codes and groups lie along tokens, so a block of all of them is the same arrays
        k, v = (replace(b, tokens=n_b, count=b.tokens // n_b) for b in (k, v))
        return k, v

    def _segment(self, k: Block, v: Block, *, prefill: bool) -> Segment:
        return Segment(k, v, valid=k.tokens * k.count, grows=True, prefill=prefill)

    def _put(self, segment: Segment) -> None:
        """Put a segment behind the others."""
        if self.segments and self.segments[-1].accepts(segment):
            self.segments[-1].join(segment)
        else:
            self.segments.append(segment)

    def _age(self) -> None:
        """Re-quantize the blocks that passed a bound."""
        held, start, old = self.offset, len(self.sinks), self.segments
        self.segments = []
        for segment in old:
            first, bits = 0, segment.k.settings.bits
            runs = list(self._runs(start, segment.tokens, segment.valid, held))
            for count, wanted in runs:
                if len(runs) == 1 and wanted >= bits:
                    self._put(segment)
                else:
                    self._put(self._part(segment, first, first + count, min(wanted, bits)))
                first += count
            start += segment.valid

    def _part(self, segment: Segment, first: int, last: int, bits: int) -> Segment:
        """Return blocks ``first`` to ``last`` of a segment at ``bits``, as copies."""
        k, v = (block.some(first, last) for block in (segment.k, segment.v))
        if bits < k.settings.bits:
            k, v = self._blocks(k.reconstruct(), v.reconstruct(), bits)
        else:  # a view would keep the others alive
            k, v = (
                replace(b, arrays={n: mx.contiguous(a) for n, a in b.arrays.items()})
                for b in (k, v)
            )
        n_b = self.settings.n_b
        valid = min(segment.valid - first * n_b, (last - first) * n_b)
        return Segment(k, v, valid=valid, grows=segment.grows, prefill=segment.prefill)

    @classmethod
    def merge(cls, caches: list[GearCache]) -> BatchAgeTieredCache:
        """Return one batched cache whose rows are ``caches``."""
        return BatchAgeTieredCache(caches)

    def _restore(self, state: list[Any]) -> None:
        self.tiers = tuple((age, bits) for age, bits in json.loads(state[1])["tiers"])
        restore(self, state)

    def _dump(self) -> list[Any]:
        version, scalars, *arrays = dump(self)
        return [version, json.dumps({**json.loads(scalars), "tiers": self.tiers}), *arrays]

    state = property(_dump, _restore)


class BatchAgeTieredCache(BatchGearCache):
    """A batch of `AgeTieredCache` rows; each compresses by itself, as its tokens have ages."""

    row_class = AgeTieredCache
    one_pass = False
