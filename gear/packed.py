"""Products with packed K and V that never unpack them: q·(Q(K) + L·R + S)ᵀ and p·(Q(V) + L·R + S).

The base is one `mx.quantized_matmul` on the codes in the layout they are stored in; L·R goes
down-project then up-project; S is gathered and scattered. Few queries only: `mx.quantized_matmul`
unpacks the codes anew for every row.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from gear.block import Block
from gear.kernels import backend
from gear.placement import beside
from gear.segments import Segment


def fits(segment: Segment) -> bool:
    """Say whether K and V of ``segment`` lie as `mx.quantized_matmul` reads them here.

    MLX's CUDA build has it for few shapes, and says so only when it runs: none is tried there.
    """
    if backend() == "cuda":
        return False

    def reads(block: Block) -> bool:
        s = block.settings
        cols = block.tokens if block.side == "k" else block.head_dim
        plain = s.base != "vector" and s.group_size in (32, 64, 128) and s.bits != 7
        return block.packed and plain and cols % s.group_size == 0

    return reads(segment.k) and reads(segment.v)


def scores(queries: mx.array, keys: Block) -> mx.array:
    """Return q·Kᵀ [batch, heads, m, tokens] of fp32 queries [batch, heads, m, head_dim]."""

    def low_rank(left: mx.array, right: mx.array) -> mx.array:
        down = queries @ right.flatten(2, 3).swapaxes(-1, -2)
        down = down.reshape(*queries.shape[:3], keys.count, -1).swapaxes(2, 3)
        return (down @ left).swapaxes(2, 3).flatten(3)

    return _product(queries, keys, low_rank)


def output(weights: mx.array, values: Block) -> mx.array:
    """Return p·V [batch, heads, m, head_dim] of fp32 weights [batch, heads, m, tokens]."""

    def low_rank(left: mx.array, right: mx.array) -> mx.array:
        by_block = weights.reshape(*weights.shape[:3], values.count, -1).swapaxes(2, 3)
        down = (by_block @ left.swapaxes(-1, -2)).swapaxes(2, 3)
        return down.flatten(3) @ right.flatten(2, 3)

    return _product(weights, values, low_rank)


def _product(
    rows: mx.array, block: Block, low_rank: Callable[[mx.array, mx.array], mx.array]
) -> mx.array:
    """Return rows times all three terms; ``low_rank`` takes Lᵀ [..., count, r, tokens] and R."""
    out = _base(rows, block)
    with beside():
        rest = _outliers(rows, block, out.shape)
        factors = block.low_rank()
        if factors is not None:
            rest = rest + low_rank(*factors)
    return out + rest


def _base(rows: mx.array, block: Block) -> mx.array:
    """Return rows [batch, heads, m, .] times the base, off its codes."""
    s = block.settings
    scale, zero = block.ranges()
    return mx.quantized_matmul(
        rows, block.arrays["codes"], scale, zero, transpose=False,
        group_size=s.group_size, bits=s.bits,
    )  # fmt: skip


def _outliers(rows: mx.array, block: Block, shape: tuple[int, ...]) -> mx.array:
    """Return rows·S in ``shape``: an outlier takes one entry of ``rows`` to one of the result."""
    sparse = block.outliers()
    if sparse is None:
        return mx.array(0.0)
    index, value = sparse
    batch, heads, m, size = shape
    token, channel = _where(block, index)
    source, target = (channel, token) if block.side == "k" else (token, channel)
    row = mx.arange(batch * heads, dtype=mx.uint32).reshape(batch, heads, 1)
    source = (source.reshape(batch, heads, -1) + row * rows.shape[-1]).flatten()
    target = (target.reshape(batch, heads, -1) + row * size).flatten()
    # m innermost: an outlier moves one run of m numbers
    taken = rows.swapaxes(-1, -2).reshape(-1, m)[source] * value.reshape(-1, 1)
    added = mx.zeros((batch * heads * size, m)).at[target].add(taken)
    return added.reshape(batch, heads, size, m).swapaxes(-1, -2)


def _where(block: Block, index: mx.array) -> tuple[mx.array, mx.array]:
    """Return token (of all the block's) and channel of each outlier, shaped as ``index`` is."""
    first = mx.arange(block.count, dtype=mx.uint32) * block.tokens
    if index.ndim == 4:  # port order: a flat place in [tokens, head_dim]
        return index // block.head_dim + first[:, None], index % block.head_dim
    first = first[:, None, None]
    vector = mx.arange(index.shape[3], dtype=mx.uint32)[:, None]
    if block.side == "k":
        return index + first, mx.broadcast_to(vector, index.shape)
    return mx.broadcast_to(vector + first, index.shape), index
