"""Additive codes whose codebook commutes with RoPE: decoding, the search for codes, and the fit.

A codebook [heads, stages, size, head_dim] has a table of entries for each stage. A vector is the
mean and a sum of entries: one code a stage picks θ[A] (values), or two pick θ[A] + J·θ[B] (keys).
J, a quarter turn of the pairs (i, i + head_dim/2) that RoPE turns, is (a, b) -> (-b, a), so that
θ[A] + J·θ[B] is [1 0]·C + [0 1]·C of the 2x2 blocks C = [[x, y], [-y, x]]. It commutes with every
rotation R of pairs: R·decode(θ) = decode(R·θ). Codes are [batch, heads, ..., tokens, codes].
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from gear.calibration import tensors
from gear.placement import release

PASSES = 2
ITERATIONS = 5
RIDGE = 3.0
"""Tokens at 0 that each entry is a mean of too: few tokens make short entries."""
SAMPLES = 1 << 13
"""Tokens that a fit uses."""


def turn(x: mx.array) -> mx.array:
    """Return J·x."""
    a, b = mx.split(x, 2, axis=-1)
    return mx.concatenate([-b, a], axis=-1)


def decode(codes: mx.array, codebook: mx.array, paired: bool) -> mx.array:
    """Return the sums of entries [batch, heads, ..., tokens, head_dim]."""
    step = 1 + paired
    parts = []
    for first in range(step):
        taken = (
            _entry(codebook[:, i // step], codes[..., i])
            for i in range(first, codes.shape[-1], step)
        )
        parts.append(sum(taken, start=mx.zeros(())))
    return parts[0] + turn(parts[1]) if paired else parts[0]


def _entry(table: mx.array, codes: mx.array) -> mx.array:
    """Return the entries [batch, heads, ..., head_dim] of a stage's table [heads, size, dims]."""
    heads, size, dims = table.shape
    first = (size * mx.arange(heads, dtype=mx.uint32)).reshape(-1, *[1] * (codes.ndim - 2))
    return mx.take(table.reshape(-1, dims), codes.astype(mx.uint32) + first, axis=0)


def encode(x: mx.array, codebook: mx.array, paired: bool, passes: int = PASSES) -> mx.array:
    """Return the codes of x [batch, heads, tokens, head_dim].

    Stage by stage, each the nearest entry to what the ones before left; then ``passes`` times code
    by code again, each the best beside all others.
    """
    step = 1 + paired
    squares = mx.square(codebook).sum(axis=-1)
    codes: list[mx.array] = []
    for number in range((passes + 1) * step * codebook.shape[1]):
        i = number % (step * codebook.shape[1])
        table, second = codebook[:, i // step], i % step == 1
        if i < len(codes):
            x = x + _turned(_entry(table, codes[i]), second)
        seen = -turn(x) if second else x
        scores = squares[:, i // step][:, None] - 2 * (seen @ table.swapaxes(-1, -2))
        codes[i : i + 1] = [mx.argmin(scores, axis=-1)]
        x = x - _turned(_entry(table, codes[i]), second)
        release(x, codes[i])
    return mx.stack(codes, axis=-1)


def _turned(x: mx.array, really: bool) -> mx.array:
    return turn(x) if really else x


def fit(
    x: np.ndarray, stages: int, size: int, paired: bool, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return fp32 codebook [heads, stages, size, head_dim] and mean [heads, head_dim] of x.

    x is [heads, tokens, head_dim]. Each stage is fitted on what the ones before leave: ITERATIONS
    times codes, then the entries that fit those best. It starts from tokens drawn from ``seed``.
    """
    draw = np.random.default_rng(seed)
    x = x[:, draw.permutation(x.shape[1])[:SAMPLES]].astype(np.float32)
    mean = x.mean(axis=1)
    left, codebook = x - mean[:, None], []
    for _ in range(stages):
        first = left[:, draw.permutation(x.shape[1])[:size]]
        table = np.pad(first, [(0, 0), (0, size - first.shape[1]), (0, 0)])
        for _ in range(ITERATIONS):
            codes = np.array(encode(mx.array(left)[None], mx.array(table[:, None]), paired, 1))[0]
            table = np.stack([_best(*one, size) for one in zip(left, codes, strict=True)])
        stage = mx.array(table[:, None])
        codes = encode(mx.array(left)[None], stage, paired, 1)
        left = left - np.array(decode(codes, stage, paired))[0]
        codebook.append(table)
    return np.stack(codebook, axis=1), mean


def _best(x: np.ndarray, codes: np.ndarray, size: int) -> np.ndarray:
    """Return the entries [size, head_dim] that fit x [tokens, head_dim] best at these codes.

    One code: means. Two: pairs are complex numbers and J is i, so that x = (P_A + i·P_B)·θ with
    0/1 matrices P; least squares, (diag(n_A + n_B) + i·(N - Nᵀ))·θ = P_Aᵀ·x - i·P_Bᵀ·x, where N
    counts the pairs (A, B). Both with RIDGE.
    """
    sums = [
        np.stack([np.bincount(one, weights=y, minlength=size) for y in x.T], axis=1)
        for one in codes.T
    ]
    members = np.bincount(codes.ravel(), minlength=size) + RIDGE
    if len(sums) == 1:
        return (sums[0] / members[:, None]).astype(np.float32)
    first, second = codes.astype(np.int64).T
    pairs = np.bincount(first * size + second, minlength=size * size).reshape(size, size)
    half = x.shape[1] // 2
    a, b = (y[:, :half] + 1j * y[:, half:] for y in sums)
    found = np.linalg.solve(np.diag(members) + 1j * (pairs - pairs.T), a - 1j * b)
    return np.concatenate([found.real, found.imag], axis=1).astype(np.float32)


def calibrated(
    reference: str, side: str, shape: tuple[int, int, int, int]
) -> tuple[mx.array, mx.array]:
    """Return the file's codebook of ``shape`` and mean [heads, 1, head_dim] of a side.

    The file may have more stages; the first are taken. Errors: ``ValueError`` for other shapes.
    """
    held = tensors(f"{reference.rpartition('.')[0]}.{side}")
    heads, stages, size, dims = shape
    codebook, mean = (held.get(name, mx.zeros((0, 0))) for name in ("codebook", "mean"))
    seen = codebook.shape
    fits = len(seen) == 4 and (seen[0], seen[2], seen[3]) == (heads, size, dims)
    if not fits or seen[1] < stages or mean.shape != (heads, dims):
        found = {name: array.shape for name, array in held.items()}
        raise ValueError(
            f"calibration {reference}: holds {found}; needed are a codebook {shape}, and a mean. "
            "Calibrate with this model and these settings."
        )
    return codebook[:, :stages].astype(mx.float32), mean[:, None].astype(mx.float32)
