"""Random rotations and sketches, which spread a vector over its coordinates.

    rotate(x) = H D₂ H D₁ x / d  (d a power of two; H Walsh-Hadamard, D random signs), else Q x
    sketch(m, d) = S [m, d], entries N(0, 1); ``orthogonal``: its rows are, in blocks of d

One H turns a vector with one or two large entries, as keys have them, into coordinates of one or
two sizes, not normal ones: Lloyd-Max at 2 bits then errs twice as much. Two H do not.
Each is drawn from a seed and d, once a process, on the CPU by NumPy; all heads, blocks and layers
share it, so it is never stored. The numbers come from Philox's raw stream, because a saved cache
must be read back with the same ones and NumPy promises no other stream across versions.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_SMALLEST = 1e-37  # a smaller norm has no finite inverse in fp32; such a vector is as good as 0
_KINDS = ("signs", "orthogonal", "sketch")


def _raw(kind: str, seed: int, head_dim: int, count: int) -> NDArray[np.uint64]:
    """Return ``count`` random words of (kind, seed, head_dim)."""
    key = np.array([seed, head_dim * len(_KINDS) + _KINDS.index(kind)], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def _normal(kind: str, seed: int, head_dim: int, rows: int) -> NDArray[np.float64]:
    """Return [rows, head_dim] of N(0, 1) by Box and Muller."""
    uniform = (_raw(kind, seed, head_dim, 2 * rows * head_dim) >> np.uint64(11)) * 2.0**-53
    radius, angle = uniform.reshape(2, rows, head_dim)
    return np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)


@lru_cache(maxsize=64)
def _signs(head_dim: int, seed: int) -> mx.array:
    """Return ±1 [2, head_dim]."""
    odd = _raw("signs", seed, head_dim, 2 * head_dim) & np.uint64(1)
    return mx.array(1 - 2 * odd.astype(np.float32).reshape(2, head_dim))


@lru_cache(maxsize=64)
def _orthogonal(head_dim: int, seed: int) -> mx.array:
    """Return an orthogonal [head_dim, head_dim]: QR of a Gaussian matrix."""
    return mx.array(np.linalg.qr(_normal("orthogonal", seed, head_dim, head_dim))[0], mx.float32)


@lru_cache(maxsize=64)
def sketch(rows: int, head_dim: int, seed: int, *, orthogonal: bool) -> mx.array:
    """Return S [rows, head_dim], every row N(0, 1) in distribution.

    ``orthogonal``: the rows of each block of head_dim are orthogonal and keep their norms.
    """
    s = _normal("sketch", seed, head_dim, rows)
    if orthogonal:
        blocks = np.split(s, range(head_dim, rows, head_dim))
        turned = np.concatenate([np.linalg.qr(block.T)[0].T for block in blocks])
        s = turned * np.linalg.norm(s, axis=-1, keepdims=True)
    return mx.array(s, mx.float32)


def product(x: mx.array, matrix: mx.array) -> mx.array:
    """Return x [..., tokens, n] times a matrix [n, k].

    It is one product a head, not a single one: how a row is rounded must not depend on the batch.
    """
    return x @ matrix[(None,) * (x.ndim - 2)]


def _fast(head_dim: int) -> bool:
    """Say whether head_dim is a power of two."""
    return head_dim & (head_dim - 1) == 0


def rotate(x: mx.array, seed: int) -> mx.array:
    """Return fp32 x [..., tokens, head_dim] rotated; norms stay."""
    head_dim = x.shape[-1]
    if _fast(head_dim):
        first, second = _signs(head_dim, seed)
        return mx.hadamard_transform(mx.hadamard_transform(x * first) * second)
    return product(x, _orthogonal(head_dim, seed).T)


def rotate_back(y: mx.array, seed: int) -> mx.array:
    """Undo `rotate`."""
    head_dim = y.shape[-1]
    if _fast(head_dim):
        first, second = _signs(head_dim, seed)
        return mx.hadamard_transform(mx.hadamard_transform(y) * second) * first
    return product(y, _orthogonal(head_dim, seed))


def norms(x: mx.array) -> mx.array:
    """Return the norm of each vector [..., 1] of fp32 x; squares neither overflow nor vanish."""
    peak = mx.abs(x).max(axis=-1, keepdims=True)
    return peak * mx.sqrt(mx.square(over(x, peak)).sum(axis=-1, keepdims=True))


def over(x: mx.array, size: mx.array) -> mx.array:
    """Return x / size, and 0 where size is 0 or too small to divide by."""
    return mx.where(size < _SMALLEST, 0, x / mx.maximum(size, _SMALLEST))
