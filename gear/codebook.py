"""Codebooks: vectors by the number of their nearest entry, and k-means that makes the entries.

Codes of up to 16 bits: ``codes`` packs the low 8 of each, ``codes_high`` the rest. A codebook is no
part of a block: it comes from a calibration file.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from gear.calibration import tensors
from gear.pack import pack, unpack
from gear.placement import release
from gear.precision import Store

ITERATIONS = 8
SAMPLES = 1 << 16
_DISTANCES = 1 << 22
"""Distances of a head that are held at once."""


def nearest(x: mx.array, codebook: mx.array) -> mx.array:
    """Return uint32 codes [batch, heads, tokens, n] of x [..., tokens, n, dims]."""
    tokens, step = x.shape[2], max(1, _DISTANCES // (x.shape[3] * codebook.shape[0]))
    # |c|² - 2·x·c as one product: the distances are too many to pass over them twice
    across = mx.concatenate([-2 * codebook.T, mx.square(codebook).sum(axis=-1)[None]])
    x = mx.concatenate([x, mx.ones((*x.shape[:-1], 1))], axis=-1)
    found = []
    for start in range(0, tokens, step):
        part = x[:, :, start : start + step]
        found.append(mx.argmin(part @ across, axis=-1))
        release(found[-1])
    return mx.concatenate(found, axis=2)


def store_codes(store: Store, codes: mx.array, bits: int) -> None:
    """Store codes [batch, heads, tokens, n] of 1 to 16 bits."""
    store.add("codes", pack(codes & 255, min(bits, 8)), None)
    if bits > 8:
        store.add("codes_high", pack(mx.right_shift(codes, 8), bits - 8), None)


def read_codes(arrays: Mapping[str, mx.array], bits: int, n: int) -> mx.array:
    """Return the uint32 codes [..., n] of what `store_codes` stored."""
    codes = unpack(arrays["codes"], min(bits, 8), n).astype(mx.uint32)
    if bits > 8:
        codes = codes + unpack(arrays["codes_high"], bits - 8, n).astype(mx.uint32) * 256
    return codes


def k_means(vectors: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return fp32 entries [count, dims] of vectors [n, dims], by Lloyd's iterations.

    It starts from ``count`` of the vectors and uses at most SAMPLES of them, drawn from ``seed``.
    An entry without vectors moves to the vector that is worst off. Of fewer vectors than entries
    all are entries, and the rest are 0.
    """
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(vectors))[: max(SAMPLES, count)]
    x = vectors[order].astype(np.float32)
    entries = np.zeros((count, x.shape[1]), np.float32)
    entries[: len(x)] = x[:count]
    for _ in range(ITERATIONS if len(x) > count else 0):
        codes = np.array(nearest(mx.array(x)[None, None, :, None], mx.array(entries))).ravel()
        members = np.bincount(codes, minlength=count)
        sums = [np.bincount(codes, weights=column, minlength=count) for column in x.T]
        missed = np.square(x - entries[codes]).sum(axis=1)
        means = np.stack(sums, axis=1) / np.maximum(members, 1)[:, None]
        lost = np.flatnonzero(members == 0)
        means[lost] = x[np.argsort(-missed, kind="stable")[: len(lost)]]
        entries = means.astype(np.float32)
    return entries


def calibrated(
    reference: str, side: str, shape: tuple[int, int], heads: int
) -> tuple[mx.array, mx.array]:
    """Return the file's fp32 codebook [count, dims] and ``smooth`` [heads, head_dim] of a side.

    ``heads`` 0: there is no ``smooth``, and it is empty. Errors: ``ValueError`` for other shapes.
    """
    held = tensors(f"{reference.rpartition('.')[0]}.{side}")
    smooth = held.get("smooth", mx.zeros((0, 0)))
    if held.get("codebook", smooth).shape != shape or smooth.shape[0] != heads:
        found = {name: array.shape for name, array in held.items()}
        raise ValueError(
            f"calibration {reference}: holds {found}; needed are a codebook {shape} and smooth for "
            f"{heads} heads. Calibrate with this model and these settings."
        )
    return held["codebook"].astype(mx.float32), smooth.astype(mx.float32)
