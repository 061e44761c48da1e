"""Latent channels: the axes in which rows vary most, by SVD, and channels of codes of few bits.

The axes are eigenvectors of XᵀX (right singular vectors of X), by NumPy's LAPACK in fp64: MLX
factorises on the CPU only. So the bases that use this are no graph; all else stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import mlx.core as mx
import numpy as np

from gear.coarse import off_grid
from gear.pack import pack, unpack
from gear.precision import Store, scale_needs_fp32, values_need_fp32, zero_needs_fp32
from gear.quantize import CLIP_FACTORS, decode, encode, step


def principal(x: mx.array) -> tuple[np.ndarray, np.ndarray]:
    """Return squared singular values [...], descending, and fp64 axes [..., cols, cols] of x.

    x is fp32 [..., rows, cols]; an axis is a row of the result, its largest entry positive.
    """
    largest = mx.abs(x).max(axis=(-1, -2), keepdims=True)
    unit = x / mx.where(largest > 0, largest, 1)
    gram = np.array(unit.swapaxes(-1, -2) @ unit, np.float64)
    if not np.isfinite(gram).all():  # the caller's block is refused; LAPACK must not see it
        gram = np.zeros_like(gram)
    values, vectors = np.linalg.eigh(gram)
    axes = vectors[..., ::-1].swapaxes(-1, -2)
    at = np.abs(axes).argmax(axis=-1)[..., None]
    axes = axes * np.where(np.take_along_axis(axes, at, axis=-1) < 0, -1, 1)
    return np.maximum(values[..., ::-1], 0), axes


def store_axes(store: Store, axes: np.ndarray) -> mx.array:
    """Store axes [batch, heads, kept, cols] as ``axes``; return them as a reader sees them."""
    found = mx.array(axes.astype(np.float32))
    return store.add("axes", found, values_need_fp32(found))


def ranges(x: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """Return scale and zero [..., rows, 1] of each row of x in codes of ``bits``.

    One bit: mean ± mean distance from it, the two levels of least error of a symmetric variable.
    More: min and max, shrunk about their middle by the factor of CLIP_FACTORS with least error.
    """
    if bits == 1:
        mean = x.mean(axis=-1, keepdims=True)
        apart = mx.abs(x - mean).mean(axis=-1, keepdims=True)
        return 2 * apart, mean - apart
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    middle, found = low / 2 + high / 2, []
    for factor in CLIP_FACTORS:
        scale, zero = step(low, high, bits) * factor, middle + (low - middle) * factor
        missed = decode(encode(x, scale, zero, bits), scale, zero) - x
        found.append(mx.square(missed).mean(axis=-1, keepdims=True))
    best = mx.array(CLIP_FACTORS)[mx.argmin(mx.concatenate(found, axis=-1), axis=-1)][..., None]
    return step(low, high, bits) * best, middle + (low - middle) * best


def _split(x: mx.array, runs: list[tuple[int, int]]) -> Iterator[mx.array]:
    """Yield the channels of x [..., channels, n] that each run of (bits, channels) has."""
    start = 0
    for _, channels in runs:
        yield x[..., start : start + channels, :]
        start += channels


def store_channels(store: Store, latent: mx.array, runs: list[tuple[int, int]]) -> None:
    """Store codes of latent [batch, heads, channels, tokens], a range for each channel.

    ``codes_BITS`` is packed along tokens, ``scale`` and ``zero`` are [batch, heads, channels, 1].
    """
    parts = list(_split(latent, runs))
    found = [ranges(part, bits) for (bits, _), part in zip(runs, parts, strict=True)]
    scale, zero = (mx.concatenate([*each], axis=-2) for each in zip(*found, strict=True))
    scale = store.add("scale", scale, scale_needs_fp32(scale))
    zero = store.add("zero", zero, zero_needs_fp32(zero, scale))
    each = zip(runs, parts, _split(scale, runs), _split(zero, runs), strict=True)
    for (bits, _), part, one, low in each:
        store.add(f"codes_{bits}", pack(encode(part, one, low, bits), bits), None)


def read_channels(
    arrays: Mapping[str, mx.array], runs: list[tuple[int, int]], tokens: int
) -> mx.array:
    """Return the fp32 latent [..., channels, tokens] of what `store_channels` stored."""
    scales, zeros = (_split(off_grid(arrays, name), runs) for name in ("scale", "zero"))
    return mx.concatenate(
        [
            decode(unpack(arrays[f"codes_{bits}"], bits, tokens), scale, zero)
            for (bits, _), scale, zero in zip(runs, scales, zeros, strict=True)
        ],
        axis=-2,
    )


def by_energy(energy: np.ndarray, share: float, most: int) -> np.ndarray:
    """Return each batch row's least rank that has ``share`` of ``energy`` in all its groups.

    ``energy`` [batch, groups, width] is squared singular values, descending.
    """
    reached = energy.cumsum(axis=-1) >= share * (1 - 1e-9) * energy.sum(axis=-1, keepdims=True)
    return (reached.argmax(axis=-1).max(axis=1) + 1).clip(max=most)


def together(x: mx.array, shared: int) -> mx.array:
    """Return x [batch, heads, tokens, head_dim] with ``shared`` heads side by side in each row."""
    batch, _, tokens, head_dim = x.shape
    split = x.reshape(batch, -1, shared, tokens, head_dim).swapaxes(2, 3)
    return split.reshape(batch, -1, tokens, shared * head_dim)


def apart(rows: mx.array, head_dim: int) -> mx.array:
    """Undo `together`; there may be axes between heads and tokens."""
    split = rows.reshape(*rows.shape[:-1], -1, head_dim)
    by_head = split.transpose(0, 1, -2, *range(2, split.ndim - 2), -1)
    return by_head.reshape(rows.shape[0], -1, *rows.shape[2:-1], head_dim)
