"""Parts of the compressed past, small enough to be unpacked one after the other.

A tile is a run of tokens of one segment: some whole blocks, or a cut of one long block. It is a
`Block` again, so what reads a block (`Block.reconstruct`) reads a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx

from gear.block import Block
from gear.pack import cut_packed
from gear.segments import Segment

_WORD_BITS = 32


def _step(segment: Segment, tokens: int) -> int | None:
    """Return where a block may be cut, a multiple of whole words and groups; None: nowhere."""
    k, v = segment.k.cut_unit, segment.v.cut_unit
    if k is None or v is None:
        return None
    unit = math.lcm(_WORD_BITS, k, v)
    return max(tokens // unit, 1) * unit


def tiles(segment: Segment, tokens: int) -> Iterator[tuple[Block, Block, int]]:
    """Yield K and V of about ``tokens`` tokens at a time, with how many of them are meant."""
    start = 0
    for k, v in _parts(segment, tokens):
        meant = min(segment.valid - start, k.tokens * k.count)
        if meant <= 0:
            return
        yield k, v, meant
        start += meant


def _parts(segment: Segment, tokens: int) -> Iterator[tuple[Block, Block]]:
    """Yield whole blocks of K and V while they are no longer than ``tokens``, else cuts of one."""
    k, v, size = segment.k, segment.v, segment.k.tokens
    per_tile, step = max(tokens // size, 1), _step(segment, tokens)
    for block in range(0, k.count, per_tile):
        some = [side.some(block, min(block + per_tile, k.count)) for side in (k, v)]
        if size <= tokens or step is None:
            yield some[0], some[1]
            continue
        for first in range(0, size, step):
            stop = min(first + step, size)
            yield cut(some[0], first, stop), cut(some[1], first, stop)


def cut(block: Block, start: int, stop: int) -> Block:
    """Return tokens ``start`` to ``stop`` of a single block; start lies on a word and a group.

    Outliers that lie elsewhere get the place behind the last one, which stands for none.
    """
    s, arrays, base = block.settings, dict(block.arrays), block.quantizer
    own = {n: arrays[n] for n in base.layout(block.side) if n in arrays}
    arrays.update(base.cut(own, block.side, s, start, stop))
    if "left" in arrays:
        left, f = arrays["left"], s.factor_bits
        arrays["left"] = left[..., start:stop] if f == 16 else cut_packed(left, f, start, stop)
    tile = replace(block, arrays=arrays, tokens=stop - start)
    if "outlier_index" in arrays:
        _cut_outliers(block, tile, start, stop)
    return tile


def _cut_outliers(block: Block, tile: Block, start: int, stop: int) -> None:
    """Put the outliers of ``tile``, tokens ``start`` to ``stop`` of ``block``, into its arrays."""
    index = block.arrays["outlier_index"]
    flat = index.ndim == 4
    if block.side == "v" and not flat:  # a vector is a token
        for name in ("outlier_index", "outlier_value", "outlier_scale"):
            if name in tile.arrays:
                tile.arrays[name] = block.arrays[name][..., start:stop, :]
        return
    unit = block.head_dim if flat else 1
    low, high = start * unit, stop * unit
    places = index.astype(mx.uint32)
    inside = (places >= low) & (places < high)
    tile.arrays["outlier_index"] = mx.where(inside, places - low, high - low)
    tile.spare = True
