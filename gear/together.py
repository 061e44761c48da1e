"""Decode steps of a batch: what its rows hold is attended to together, not row by row.

The rows' buffers lie side by side in one array, every row's newest token in the same column, so a
step writes one column and attends with one product; a mask cuts off what a row has not. Segments
of one kind and length are stacked on the batch axis, and the rows keep views of the stacks, so
nothing is held twice. Rows differ in length: those whose segments are alike form a stack, the
partials of all stacks merge in `gear.attention`'s running softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import mlx.core as mx

from gear.attention import LOWEST, Partial, dense_partial, divided, merged, pieces
from gear.block import Block
from gear.cache import GearCache
from gear.exact_tokens import ExactTokens
from gear.placement import traced
from gear.segments import Segment


class _Columns:
    """K and V [batch, kv_heads, columns, head_dim] of the rows' buffers; they end at ``end``."""

    def __init__(self, buffers: Sequence[ExactTokens], most: int, like: Sequence[mx.array]) -> None:
        self.lengths = [len(buffer) for buffer in buffers]
        self.end = max(self.lengths)
        self.width = 2 * (max(most, self.end) + 1)  # so that columns move down once in `most` steps
        sides = []
        for side, new in enumerate(like):
            held = mx.zeros((len(buffers), new.shape[1], self.width, new.shape[3]), new.dtype)
            for i, buffer in enumerate(buffers):
                if buffer.arrays:
                    held[i : i + 1, :, self.end - len(buffer) : self.end] = buffer.arrays[side]
            sides.append(held)
        self.arrays = sides

    def append(self, new: Sequence[mx.array]) -> None:
        """Write one token of every row [batch, kv_heads, 1, head_dim] into the next column."""
        if self.end == self.width:
            longest = max(self.lengths)
            rest = [(0, 0), (0, 0), (0, self.width - longest), (0, 0)]
            self.arrays = [mx.pad(a[:, :, self.end - longest :], rest) for a in self.arrays]
            self.end = longest
        for held, token in zip(self.arrays, new, strict=True):
            held[:, :, self.end : self.end + 1] = token
        self.end += 1
        self.lengths = [n + 1 for n in self.lengths]

    def seen(self) -> mx.array:
        """Return which columns are a row's own, [batch, 1, 1, 1, columns]."""
        starts = tuple(self.end - n for n in self.lengths)
        return _between(starts, self.end, self.width)


@lru_cache(maxsize=64)  # the layers of a model ask the same
def _between(starts: tuple[int, ...], end: int, width: int) -> mx.array:
    """Return a mask of the columns from each start to ``end``."""
    columns = mx.arange(width)
    mask = (columns >= mx.array(starts)[:, None]) & (columns < end)
    return mask[:, None, None, None]


class _Window(ExactTokens):
    """One row's buffer while it lies in the columns; it grows there and gives its oldest away."""

    def __init__(self, columns: _Columns, row: int) -> None:
        self._columns, self._row = columns, row

    def __len__(self) -> int:
        return self._columns.lengths[self._row]

    @property
    def arrays(self) -> list[mx.array]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """K and V as views; nothing where the buffer is empty."""
        at, end = self._row, self._columns.end
        if not len(self):
            return []
        return [a[at : at + 1, :, end - len(self) : end] for a in self._columns.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of the columns that are this row's, the free ones too."""
        held = self._columns.arrays
        return sum(a.nbytes for a in held) // held[0].shape[0]

    def take(self, n: int) -> tuple[mx.array, mx.array]:
        """Remove and return the oldest ``n`` tokens."""
        keys, values = (a[:, :, :n] for a in self.arrays)
        self._columns.lengths[self._row] -= n
        return keys, values


_Attention = Callable[[mx.array, mx.array | None], Partial]


@dataclass
class _Stack:
    """Like segments of the rows ``members`` as one; ``order`` picks those rows, None = all."""

    members: tuple[int, ...]
    segment: Segment
    parts: tuple[tuple[Block, Block], ...]
    order: mx.array | None
    _ways: dict[tuple[int, ...], list[tuple[_Attention, bool]]] = field(default_factory=dict)

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Say whether these segments are still the views that were made of this stack."""
        both = zip(segments, self.parts, strict=True)
        return all(s.k is k and s.v is v for s, (k, v) in both)

    def partial(self, queries: mx.array, tile: int) -> Partial:
        """Return the rows' partial, [members, kv_heads, heads per KV head, 1, .]."""
        q = queries if self.order is None else queries[self.order]
        ways = self._ways.get(q.shape)
        if ways is None:  # how to attend is found out once, not at every step
            found = pieces(self.segment, q, few=True, tile=tile)
            ways = self._ways[q.shape] = [(attention, large) for _, attention, large in found]
        (first, _), *rest = ways
        total = first(q, None)
        for attention, large in rest:
            if large:
                mx.eval(total)  # or all that was unpacked would be held
            total = merged(total, attention(q, None))
        return total


def _stacked(members: tuple[int, ...], segments: Sequence[Segment], batch: int) -> _Stack:
    """Return the stack of like segments; they hold views of it from now on."""
    first, whole = segments[0], []
    for side in "kv":
        blocks = [getattr(s, side) for s in segments]
        names = blocks[0].arrays
        joined = {n: mx.concatenate([b.arrays[n] for b in blocks]) for n in names}
        whole.append(replace(blocks[0], arrays=joined))
        for i, segment in enumerate(segments):
            view = {n: a[i : i + 1] for n, a in joined.items()}
            setattr(segment, side, replace(blocks[0], arrays=view))
    parts = tuple((s.k, s.v) for s in segments)
    order = None if len(members) == batch else mx.array(members)
    return _Stack(members, replace(first, k=whole[0], v=whole[1]), parts, order)


@dataclass(frozen=True)
class _Level:
    """The n-th segments of all rows, in stacks; ``back`` puts the rows in order again."""

    stacks: list[_Stack]
    back: mx.array | None

    def partial(self, queries: mx.array, tile: int) -> Partial:
        """Return the rows' partials; a row without a segment here gets one of no weight."""
        found = [stack.partial(queries, tile) for stack in self.stacks]
        return found[0] if self.back is None else _in_order(found, self.back)


@traced
def _in_order(found: list[Partial], back: mx.array) -> Partial:
    """Return the partials of all stacks as one, a row of no weight behind them, taken by `back`."""
    neutral = (mx.zeros_like(found[0][0][:1]), *(mx.zeros_like(n[:1]) for n in found[0][1:]))
    neutral = (neutral[0], neutral[1] + LOWEST, neutral[2])
    out, peak, weight = (
        mx.concatenate(list(part))[back] for part in zip(*found, neutral, strict=True)
    )
    return out, peak, weight


class Together:
    """The rows of a batch while each gets one token a step.

    The rows' buffers are windows of shared columns until `part` gives each its own again. Their
    sinks are full. ``like`` are K and V of a call, for shape and dtype.
    """

    def __init__(self, rows: list[GearCache], tile: int, like: Sequence[mx.array]) -> None:
        most = rows[0].settings.n_b + rows[0].settings.recent
        self._rows, self._tile, self.layer = rows, tile, rows[0].layer
        self.offsets = [row.offset for row in rows]
        """Position of each row's next token."""
        self._columns = _Columns([row.buffer for row in rows], most, like)
        for i, row in enumerate(rows):
            row.buffer = _Window(self._columns, i)
        sinks = [row.sinks.arrays for row in rows if row.sinks.arrays]
        self._sinks = [mx.concatenate(list(side)) for side in zip(*sinks, strict=True)]
        self._levels: list[_Level] = []
        self._seen: list[Block] = []

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Append one token of every row, K and V [batch, kv_heads, 1, head_dim]."""
        self._columns.append((keys, values))
        self.offsets = [n + 1 for n in self.offsets]

    def part(self) -> None:
        """Give every row a buffer of its own."""
        for row in self._rows:
            own = ExactTokens()
            own.arrays = [mx.contiguous(a) for a in row.buffer.arrays]
            row.buffer = own

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Return the attention [batch, heads, 1, head_dim] of one query a row over all its tokens.

        ``sinks`` [heads] are logits that only take weight.
        """
        batch, heads, _, head_dim = queries.shape
        kv_heads = self._columns.arrays[0].shape[1]
        shape = (batch, kv_heads, heads // kv_heads, 1, head_dim)
        q = (queries.astype(mx.float32) * scale).reshape(shape)
        total = dense_partial(*self._columns.arrays, q, self._columns.seen())
        if self._sinks:
            total = merged(total, dense_partial(*self._sinks, q, None))
        for level in self._current():
            total = merged(total, level.partial(q, self._tile))
        return divided(total, sinks).reshape(batch, heads, 1, -1).astype(queries.dtype)

    def _current(self) -> list[_Level]:
        """Return the levels, made anew where a row has got a block since."""
        if not _same(self._keys(), self._seen):
            levels = enumerate(self._levels)
            known = {(n, stack.members): stack for n, level in levels for stack in level.stacks}
            depth = max(len(row.segments) for row in self._rows)
            self._levels = [self._level(n, known) for n in range(depth)]
            self._seen = self._keys()
        return self._levels

    def _keys(self) -> list[Block]:
        """Return K of every segment, row by row: another object where something was compressed."""
        return [segment.k for row in self._rows for segment in row.segments]

    def _level(self, n: int, known: dict[tuple[int, tuple[int, ...]], _Stack]) -> _Level:
        """Return the level of the rows' ``n``-th segments; stacks that still hold stay."""
        alike: dict[Any, list[int]] = {}
        for i, row in enumerate(self._rows):
            if n < len(row.segments):
                alike.setdefault(_kind(row.segments[n]), []).append(i)
        stacks = []
        for members in map(tuple, alike.values()):
            segments = [self._rows[i].segments[n] for i in members]
            old = known.get((n, members))
            if old is None or not old.holds(segments):
                old = _stacked(members, segments, len(self._rows))
            stacks.append(old)
        places = {i: place for place, i in enumerate(i for s in stacks for i in s.members)}
        if len(stacks) == 1 and len(places) == len(self._rows):
            return _Level(stacks, None)
        back = [places.get(i, len(places)) for i in range(len(self._rows))]
        return _Level(stacks, mx.array(back))


def _same(now: Sequence[Block], before: Sequence[Block]) -> bool:
    """Say whether these are the very same blocks."""
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _kind(segment: Segment) -> tuple[Any, ...]:
    """Return what like segments share: settings, tokens, dtypes, shapes."""
    blocks = segment.k, segment.v
    forms = (tuple((n, str(a.dtype), a.shape[1:]) for n, a in b.arrays.items()) for b in blocks)
    return (segment.valid, *(b.kind for b in blocks), *forms)
