"""S: which entries are kept apart, and where they stand.

Paper order (``pre_quant``): of every vector of n entries, the k smallest and k largest,
k = min(floor(s*n/2 + 0.5), n // 2); s = 1 takes all. Port order (``post_lowrank``): the
int(s*N*D) entries of largest magnitude of what base and low rank left, per head.
Ties are broken as one stable ascending sort would, so a result never depends on the device.
"""

from __future__ import annotations

import math

import mlx.core as mx

from gear.placement import release


def outliers_per_end(n: int, sparse_frac: float) -> int:
    """Return k, the outliers at each end of a vector of ``n`` entries."""
    return min(math.floor(sparse_frac * n / 2 + 0.5), n // 2)


def outliers_per_head(tokens: int, head_dim: int, sparse_frac: float) -> int:
    """Return the port's count for one head: int(s * N * D)."""
    return int(sparse_frac * tokens * head_dim)


def index_dtype(length: int, *, flat: bool = False) -> mx.Dtype:
    """Return the smallest unsigned dtype for ``length`` places; from uint16 for a flat head."""
    if length <= 2**8 and not flat:
        return mx.uint8
    return mx.uint16 if length <= 2**16 else mx.uint32


def _ordered(x: mx.array) -> mx.array:
    """Return int32 keys in the order of fp32 ``x`` (-0 is 0): they partition twice as fast."""
    bits = (x + 0.0).view(mx.int32)
    return bits ^ (mx.right_shift(bits, 31) & 0x7FFFFFFF)


def _kth_smallest(x: mx.array, k: int) -> mx.array:
    """Return the k-th smallest entry (k from 1) along the last axis, kept as an axis."""
    if k == 1:
        return x.min(axis=-1, keepdims=True)
    if k == x.shape[-1]:
        return x.max(axis=-1, keepdims=True)
    return mx.partition(x, k - 1, axis=-1)[..., k - 1 : k]


def _low_end(keys: mx.array, k: int) -> mx.array:
    """Mark the ``k`` smallest keys of each vector; among equals the first."""
    edge = _kth_smallest(keys, k)
    below, ties = keys < edge, keys == edge
    room = k - below.sum(axis=-1, keepdims=True)
    return below | (ties & (mx.cumsum(ties, axis=-1) <= room))


def _high_end(keys: mx.array, k: int) -> mx.array:
    """Mark the ``k`` largest keys of each vector; among equals the last."""
    edge = _kth_smallest(keys, keys.shape[-1] - k + 1)
    above, ties = keys > edge, keys == edge
    skip = ties.sum(axis=-1, keepdims=True) - (k - above.sum(axis=-1, keepdims=True))
    return above | (ties & (mx.cumsum(ties, axis=-1) > skip))


def smallest(x: mx.array, k: int) -> mx.array:
    """Mark the ``k`` smallest entries of each fp32 vector [..., n]; among equals the first."""
    return _low_end(_ordered(x), k)


def outlier_mask(x: mx.array, per_end: int) -> mx.array:
    """Mark the ``per_end`` smallest and largest entries of each fp32 vector [..., n]."""
    if 2 * per_end == x.shape[-1]:
        return mx.ones(x.shape, dtype=mx.bool_)
    keys = _ordered(x)
    low = _low_end(keys, per_end)
    release(low)
    return low | _high_end(keys, per_end)


def positions(mask: mx.array, count: int) -> mx.array:
    """Return the ascending places [..., count] (uint32) of the ``count`` marks in mask [..., n]."""
    n = mask.shape[-1]
    place = mx.arange(n, dtype=mx.uint32)
    slot = mx.where(mask, mx.cumsum(mask.astype(mx.uint32), axis=-1) - 1, count)
    # what is not marked lands in one spare slot, which is cut off again
    out = mx.zeros((*mask.shape[:-1], count + 1), dtype=mx.uint32)
    return mx.put_along_axis(out, slot, mx.broadcast_to(place, mask.shape), axis=-1)[..., :count]
