"""S: which entries are kept apart, and where they stand.

Paper order (``pre_quant``): of every vector of n entries, the k smallest and k largest,
k = min(floor(s*n/2 + 0.5), n // 2); s = 1 takes all. Port order (``post_lowrank``): the
int(s*N*D) entries of largest magnitude of what base and low rank left, per head.
Ties are broken as one stable ascending sort would, so a result never depends on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from gear.placement import on_cpu

_SHORTEST_CHUNK = 4


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
    """Return int32 in the order of fp32 ``x`` (-0 is 0)."""
    bits = (x + 0.0).view(mx.int32)
    return bits ^ (mx.right_shift(bits, 31) & 0x7FFFFFFF)


def _keys(ordered: mx.array, place: mx.array) -> mx.array:
    """Return int64 keys in the stable order of ``ordered``: unique, the place is the low half."""
    return mx.left_shift(ordered.astype(mx.int64), mx.array(32, mx.int64)) + place.astype(mx.int64)


def _places(keys: mx.array) -> mx.array:
    """Return the places in ``keys``, uint32."""
    return (keys & 0xFFFFFFFF).astype(mx.uint32)


def _extremes(ordered: mx.array, place: mx.array, k: int, high: bool) -> mx.array:
    """Return the places of the ``k`` lowest or highest of ``ordered`` [..., n], in any order."""
    keys, n = _keys(ordered, place), ordered.shape[-1]
    if k < n:
        keys = mx.partition(keys, n - k if high else k - 1, axis=-1)
        keys = keys[..., n - k :] if high else keys[..., :k]
    return _places(keys)


def _end(ordered: mx.array, k: int, high: bool) -> mx.array:
    """Return where the ``k`` lowest or highest of ``ordered`` [..., n] stand, in any order.

    Long vectors are cut into chunks first: the k extremes lie in the k chunks whose own extremes
    (among equals the first or last chunk) are, so only those are looked through.
    """
    n = ordered.shape[-1]
    if k == 1:  # of equals the first is found, and the highest is to be the last
        if not high:
            return mx.argmin(ordered, axis=-1, keepdims=True)
        return n - 1 - mx.argmax(ordered[..., ::-1], axis=-1, keepdims=True)
    chunk = 1 << (math.isqrt(n // k).bit_length() - 1)  # a power of 2 seldom needs padding
    if chunk < _SHORTEST_CHUNK:
        return _extremes(ordered, mx.arange(n), k, high)
    short = -n % chunk
    if short:
        fill = mx.iinfo(mx.int32).min if high else mx.iinfo(mx.int32).max
        ordered = mx.pad(
            ordered, [(0, 0)] * (ordered.ndim - 1) + [(0, short)], constant_values=fill
        )
    chunks = ordered.reshape(*ordered.shape[:-1], -1, chunk)
    best = chunks.max(axis=-1) if high else chunks.min(axis=-1)
    numbers = _extremes(best, mx.arange(best.shape[-1]), k, high)[..., None]
    near = mx.take_along_axis(chunks, numbers, axis=-2).flatten(-2)
    return _extremes(near, (numbers * chunk + mx.arange(chunk)).flatten(-2), k, high)


def outlier_places(x: mx.array, per_end: int) -> mx.array:
    """Return where the ``per_end`` smallest and largest entries of each fp32 vector [..., n] stand.

    Ascending uint32 [..., 2 * per_end]; among equals the first are smallest, the last largest.
    """
    ordered = _ordered(x)
    if on_cpu():
        ends = [_end(ordered, per_end, high) for high in (False, True)]
    else:  # whatever is asked for, a GPU sorts
        keys = mx.sort(_keys(ordered, mx.arange(x.shape[-1])), axis=-1)
        ends = [_places(keys[..., :per_end]), _places(keys[..., -per_end:])]
    return mx.sort(mx.concatenate(ends, axis=-1), axis=-1)


def largest_places(x: mx.array, count: int) -> mx.array:
    """Return where the ``count`` largest magnitudes of each fp32 vector [..., n] stand, ascending.

    Among equals the first are taken.
    """
    return mx.sort(_extremes(_ordered(-mx.abs(x)), mx.arange(x.shape[-1]), count, False), axis=-1)


def filled(x: mx.array, places: mx.array | None, value: float) -> mx.array:
    """Return x [..., n] with ``value`` at ``places`` [..., k]."""
    if places is None:
        return x
    return mx.put_along_axis(x, places, mx.array(value, x.dtype), axis=-1)


@dataclass(frozen=True)
class Rows:
    """One side of a block as its base sees it, and what of it S takes."""

    x: mx.array
    """fp32 [batch, heads, rows, cols]: V, and K unless transposed, is [.., tokens, head_dim]."""
    side: str = "v"
    places: mx.array | None = None
    """Where the outliers of each vector stand, [batch, heads, vectors, 2k], or None."""
    across: bool = False
    """The vectors are x's columns (K by token), not its rows."""

    def filled(self, like: mx.array, value: float) -> mx.array:
        """Return ``like``, shaped as x, with ``value`` at the places of the outliers."""
        if self.places is None or not self.across:
            return filled(like, self.places, value)
        return filled(like.swapaxes(-1, -2), self.places, value).swapaxes(-1, -2)
