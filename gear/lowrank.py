"""L·R: the best rank-r approximation of a residual E [..., N, D], per row and head.

L [..., N, r] and R [..., r, D] each carry the square root of the singular values. The default
solver is block power iteration (Halko et al., arXiv:0909.4061, 4.4). On a GPU it is made of matrix
products and element-wise steps alone: `mx.linalg` factorisations run on the CPU stream only, so
``gram`` and ``svd`` are references, refused there.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from gear import kernels
from gear.placement import on_cpu

_OVERSAMPLING = 4
_SMALL_ITERATIONS = 3


@lru_cache(maxsize=64)
def _start(seed: int, head_dim: int, rank: int) -> mx.array:
    """Return Omega [D, r], drawn from (seed, D, r) alone: every head, block and layer shares it."""
    key = mx.random.key(seed * 1_000_003 + head_dim * 1009 + rank)
    omega = mx.random.normal((head_dim, rank), key=key)
    mx.eval(omega)
    return omega


@lru_cache(maxsize=32)
def _constants(rank: int) -> tuple[mx.array, mx.array]:
    """Return 1 [r, r] and what pivot j is held above by: the ridge below row j, inf elsewhere."""
    floor = np.where(np.tri(rank, k=-1).T > 0, kernels.ridge_of(rank), np.inf)
    eye, floors = mx.eye(rank), mx.array(floor[..., None], mx.float32)
    mx.eval(eye, floors)
    return eye, floors


def _inverse_factor(gram: mx.array) -> mx.array:
    """Return C [..., r, r] with CᵀGC = 1 for a Gram matrix G = YᵀY.

    Elimination on [G | 1], a column a step over arrays of the whole batch: C = (D^-1/2 · L^-1)ᵀ of
    G = LDLᵀ. The ridge keeps a direction that E does not have from dividing by rounding noise:
    one pass lifts noise of 1e-7 to 1e-4 at most. It is relative to a diagonal of 1, made first.
    On a GPU one kernel does the same.
    """
    if kernels.usable(gram.shape[-1]):
        return kernels.inverse_factor(gram)
    rank, (eye, floors) = gram.shape[-1], _constants(gram.shape[-1])
    ridge = kernels.ridge_of(rank)
    unit = mx.rsqrt(mx.maximum((gram * eye).sum(axis=-1, keepdims=True), 1e-30))
    gram = gram * unit * unit.swapaxes(-1, -2)
    work = mx.concatenate([gram + ridge * eye, mx.broadcast_to(eye, gram.shape)], axis=-1)
    for j in range(rank - 1):
        row, column = work[..., j : j + 1, :], work[..., j : j + 1]
        # rows up to j divide by inf: they stay as they are
        work = work - column / mx.maximum(column[..., j : j + 1, :], floors[j]) * row
    pivots = mx.maximum((work[..., :rank] * eye).sum(axis=-1, keepdims=True), ridge)
    return (work[..., rank:] * mx.rsqrt(pivots)).swapaxes(-1, -2) * unit


def _orthonormal(y: mx.array, passes: int = 2) -> mx.array:
    """Orthonormalise the columns of y [..., n, r]; a direction that is only noise stays near 0.

    A second pass makes up for a bad condition, which one squares; between steps one is enough.
    """
    for _ in range(passes):
        y = y @ _inverse_factor(y.swapaxes(-1, -2) @ y)
    return y


def _lead(small: mx.array, rank: int) -> mx.array:
    """Return the ``rank`` leading directions [..., m, rank] of a small Gram matrix [..., m, m]."""
    if kernels.usable(small.shape[-1]):
        return kernels.lead(small, rank, _SMALL_ITERATIONS)
    lead = small[..., :rank]
    for _ in range(_SMALL_ITERATIONS):
        lead = small @ _orthonormal(lead, passes=1)
    return _orthonormal(lead)


def _leading(gram: mx.array, start: mx.array, rank: int, iterations: int) -> mx.array:
    """Return the ``rank`` leading eigenvectors [..., D, rank] of gram [..., D, D].

    The block is a few columns wider than the rank; the same iteration on its projected Gram matrix
    then turns it towards the leading vectors.
    """
    # products are kept near 1: the largest entry of EᵀE lies on its diagonal
    peak = mx.diagonal(gram, axis1=-2, axis2=-1).max(axis=-1)[..., None, None]
    unit, v = gram * (1 / mx.maximum(peak, 1e-37)), start
    for i in range(iterations + 1):
        v = _orthonormal(unit @ v, passes=1 if i == 0 else 2)
    if start.shape[-1] > rank:
        v = v @ _lead(v.swapaxes(-1, -2) @ (unit @ v), rank)
    return v


def _leading_on_host(gram: mx.array, start: mx.array, rank: int, iterations: int) -> mx.array:
    """Return what `_leading` does, by NumPy's LAPACK in fp64: fewer, larger steps for a CPU."""
    host = np.array(gram).astype(np.float64)
    if not np.isfinite(host).all():
        host = np.zeros_like(host)  # LAPACK would not end; the block is refused afterwards
    v = np.array(start).astype(np.float64)
    for _ in range(iterations + 1):
        v, _ = np.linalg.qr(host @ v)
    if start.shape[-1] > rank:
        _, turned = np.linalg.eigh(v.swapaxes(-1, -2) @ (host @ v))
        v = v @ turned[..., : -rank - 1 : -1]
    return mx.array(v.astype(np.float32))


def _power(e: mx.array, rank: int, iterations: int, seed: int) -> tuple[mx.array, mx.array]:
    """Solve by block power iteration on EᵀE; E = 0 gives L = R = 0.

    E is read twice, for EᵀE [D, D] and for L; all steps between are small.
    """
    gram = e.swapaxes(-1, -2) @ e
    start = _start(seed, e.shape[-1], min(rank + _OVERSAMPLING, *e.shape[-2:]))
    v = (_leading_on_host if on_cpu() else _leading)(gram, start, rank, iterations)
    left = e @ v
    root = mx.sqrt(mx.sqrt((left * left).sum(axis=-2, keepdims=True)))
    left = mx.where(root > 0, left / mx.maximum(root, 1e-30), 0)
    return left, (v * root).swapaxes(-1, -2)


def _gram(e: mx.array, rank: int) -> tuple[mx.array, mx.array, mx.array]:
    """Solve by eigenvectors of EᵀE (CPU); also return all singular values, descending."""
    peak = mx.maximum(mx.abs(e).max(axis=(-1, -2), keepdims=True), 1e-37)
    unit = e / peak
    values, vectors = mx.linalg.eigh(unit.swapaxes(-1, -2) @ unit, stream=mx.cpu)
    singular = mx.sqrt(mx.maximum(values[..., ::-1], 0)) * peak[..., 0]
    basis = vectors[..., ::-1][..., :rank]
    left = e @ basis
    norm = mx.sqrt((left * left).sum(axis=-2, keepdims=True))
    root = mx.sqrt(norm)
    return (
        mx.where(norm > 0, left / mx.maximum(root, 1e-30), 0),
        basis.swapaxes(-1, -2) * root.swapaxes(-1, -2),
        singular,
    )


def _svd(e: mx.array, rank: int) -> tuple[mx.array, mx.array, mx.array]:
    """Solve by full singular value decomposition (CPU); also return all singular values."""
    u, s, vt = mx.linalg.svd(e, stream=mx.cpu)
    root = mx.sqrt(s[..., :rank])
    return u[..., :rank] * root[..., None, :], vt[..., :rank, :] * root[..., :, None], s


def _rank_by_energy(singular: mx.array, energy: str, threshold: float, cap: int) -> mx.array:
    """Return per batch row the smallest rank that reaches ``threshold`` in all its heads."""
    weight = singular if energy == "nuclear" else singular * singular
    total = weight.sum(axis=-1, keepdims=True)
    reached = mx.cumsum(weight, axis=-1) >= threshold * total * (1 - 1e-6)
    needed = mx.minimum(mx.argmax(reached, axis=-1) + 1, cap)
    return mx.where(total[..., 0] > 0, needed, 1).max(axis=-1)


def low_rank(
    e: mx.array,
    rank: int | None,
    *,
    solver: str = "power",
    iterations: int = 2,
    seed: int = 0,
    max_rank: int = 16,
    energy: str = "squared",
    energy_threshold: float = 0.9,
) -> tuple[mx.array, mx.array]:
    """Return L [batch, heads, N, r] and R [batch, heads, r, D] of the fp32 residual e [..., N, D].

    ``rank`` is clamped to min(N, D). ``rank=None`` picks, per batch row, the smallest rank up to
    ``max_rank`` whose singular values reach ``energy_threshold`` (by the CPU reference); r is then
    the largest row's, and a row's unused columns are zero.

    Errors: ``ValueError`` for a CPU-only solver when the default device is a GPU.
    """
    most = min(e.shape[-2:])
    if solver != "power" or rank is None:
        if not on_cpu():
            raise ValueError(
                f"gear.solver={solver!r}, gear.rank={rank!r}: needs a factorisation that MLX runs "
                "on the CPU only; use solver=power with a fixed rank, or device=cpu."
            )
        e = mx.where(mx.isfinite(e), e, 0)  # inf inside LAPACK ends the process; callers refuse it
        cap = min(max_rank if rank is None else rank, most)
        left, right, singular = (_svd if solver == "svd" else _gram)(e, cap)
        if rank is None:
            ranks = _rank_by_energy(singular, energy, energy_threshold, cap)
            r = int(np.array(ranks).max())
            used = (mx.arange(r) < ranks[:, None])[:, None, None, :]
            left, right = mx.where(used, left[..., :r], 0), right[..., :r, :]
            right = mx.where(used.swapaxes(-1, -2), right, 0)
        return left, right
    return _power(e, min(rank, most), iterations, seed)
