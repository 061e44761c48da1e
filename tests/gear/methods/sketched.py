"""What the tests of rotated and sketched bases share."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from gear import GearConfig, resolve
from gear.block import Block
from gear.codec import compress
from tests.gear.oracle_cases import to_numpy


def gaussian(tokens: int, head_dim: int, seed: int = 0) -> np.ndarray:
    """Return [1, 2, tokens, head_dim] of N(0, 1)."""
    return np.random.default_rng(seed).normal(size=(1, 2, tokens, head_dim))


def block(x: np.ndarray, base: str, bits: int, side: str = "k", **options: Any) -> Block:
    """Return the base's own block of x."""
    config = GearConfig(
        base=base, bits=bits, base_options=options, n_b=64, rank=0, rank_decode=0, sparse_frac=0.0
    )
    s = resolve(config, 1)[0]
    return compress(mx.array(x.astype(np.float32)), side, s.k, s, 0)


def rebuilt(x: np.ndarray, base: str, bits: int, side: str = "k", **options: Any) -> np.ndarray:
    """Return what a block of x says, fp64."""
    return to_numpy(block(x, base, bits, side, **options).reconstruct())


def slope(x: np.ndarray, found: np.ndarray, queries: int = 64) -> float:
    """Return the slope of <q, found> on <q, x> over random q; 1 is unbiased."""
    q = np.random.default_rng(99).normal(size=(1, 2, x.shape[-1], queries))
    exact = x @ q
    return float((exact * (found @ q)).sum() / np.square(exact).sum())


def error(x: np.ndarray, found: np.ndarray) -> float:
    """Return the squared error as a share of x's squares: per coordinate, where x is N(0, 1)."""
    return float(np.square(found - x).sum() / np.square(x).sum())


def bits_per_element(held: Block) -> float:
    """Return the stored bits per element."""
    return 8 * sum(held.terms().values()) / (held.arrays["codes"].shape[1] * held.tokens
                                             * held.head_dim)  # fmt: skip
