"""Palu: latents of head groups by hand in fp64, the rank by energy, its cap, the cost."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from gear import GearCache, GearConfig
from gear.codec import compress
from gear.methods.palu import Palu
from tests.gear.base_cases import settings
from tests.gear.oracle_cases import to_numpy


def _alike(heads: int, tokens: int, rank: int, seed: int = 0) -> np.ndarray:
    """Return [1, heads, tokens, 64] of rank ``rank`` over all heads, falling, and little else."""
    rng = np.random.default_rng(seed)
    latent = rng.normal(size=(tokens, rank)) * 0.9 ** np.arange(rank)
    x = latent @ rng.normal(size=(rank, heads * 64)) + 0.05 * rng.normal(size=(tokens, heads * 64))
    return x.reshape(tokens, heads, 64).swapaxes(0, 1)[None]


def _by_hand(x: np.ndarray, bits: int, group: int, energy: float, most: float) -> np.ndarray:
    """Return x [heads, tokens, head_dim], all of its heads in one group, as Palu stores it."""
    heads, tokens, head_dim = x.shape
    rows = x.swapaxes(0, 1).reshape(tokens, -1)
    _, singular, axes = np.linalg.svd(rows, full_matrices=False)
    share = np.cumsum(singular**2) / np.sum(singular**2)
    rank = min(int(np.argmax(share >= energy)) + 1, int(most * min(rows.shape)))
    latent = (rows @ axes[:rank].T).T.reshape(rank, -1, group)
    low, high = latent.min(axis=-1, keepdims=True), latent.max(axis=-1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    seen = (low + step * np.round((latent - low) / step)).reshape(rank, tokens)
    return (seen.T @ axes[:rank]).reshape(tokens, heads, head_dim).swapaxes(0, 1)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("side", ["k", "v"])
def test_each_group_of_four_heads_is_the_one_made_by_hand(side: str, bits: int) -> None:
    x = np.concatenate([_alike(4, 128, 20, seed) for seed in (1, 2)], axis=1)
    s = settings("palu", bits=bits, sparse_frac=0.0, base_options={"most": 0.5})
    block = compress(mx.array(x, mx.float32), side, s.k, s, 0)
    found = to_numpy(block.reconstruct())[0]
    assert block.arrays["axes"].shape[1] == 2
    for first in (0, 4):
        part = x[0, first : first + 4]
        expected = _by_hand(part, bits, 64, 0.9, 0.5)
        error, right = (np.linalg.norm(y - part) for y in (found[first : first + 4], expected))
        # a group may need less rank than its neighbour, whose rank it gets
        assert error <= 1.01 * right
        assert error >= 0.8 * right


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 1), (3, 1), (4, 1), (8, 2), (9, 3)])
def test_four_heads_share_where_there_are_as_many(heads: int, groups: int) -> None:
    s = settings("palu", sparse_frac=0.0, base_options={"most": 0.5})
    block = compress(mx.array(_alike(heads, 64, 6), mx.float32), "k", s.k, s, 0)
    assert block.arrays["axes"].shape[1] == groups
    assert block.arrays["axes"].shape[-1] == heads // groups * 64


def test_the_rank_is_the_least_that_reaches_the_energy_and_is_capped() -> None:
    x = _alike(4, 256, 20)
    rows = x[0].swapaxes(0, 1).reshape(256, -1)
    share = np.cumsum(np.linalg.svd(rows)[1] ** 2) / np.sum(rows**2)
    for energy in (0.5, 0.9, 0.99):
        s = settings("palu", sparse_frac=0.0, base_options={"latent_energy": energy, "most": 0.5})
        block = compress(mx.array(x, mx.float32), "k", s.k, s, 0)
        assert block.arrays["codes"].shape[2] == int(np.argmax(share >= energy)) + 1
    s = settings("palu", sparse_frac=0.0, base_options={"latent_energy": 1.0, "most": 0.1})
    assert compress(mx.array(x, mx.float32), "k", s.k, s, 0).arrays["codes"].shape[2] == 25


def test_heads_that_share_cost_less_than_heads_alone() -> None:
    """Four heads of one latent space: a single head's rank is as high, so alone it costs more."""
    x, s = mx.array(_alike(4, 256, 20), mx.float32), settings("palu", sparse_frac=0.0)
    shared = compress(x, "k", s.k, s, 0)
    alone = [compress(x[:, i : i + 1], "k", s.k, s, 0) for i in range(4)]
    assert shared.terms()["codes"] < 0.4 * sum(b.terms()["codes"] for b in alone)


def test_a_decode_block_has_axes_of_its_own() -> None:
    cache = GearCache(Palu(settings=GearConfig(n_b=64)).layers(1)[0])
    for i in range(65):
        x = mx.array(_alike(4, 130, 20)[:, :, i : i + 1], mx.float32)
        cache.update_and_fetch(x, x)
    [segment] = cache.segments
    assert (segment.k.tokens, segment.k.arrays["axes"].shape[2]) == (64, 1)
