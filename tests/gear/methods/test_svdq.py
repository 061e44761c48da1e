"""SVDq: latent channels by hand in fp64, per head against shared, and what it costs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from gear import GearConfig
from gear.checks import SettingError
from gear.codec import compress
from gear.methods.svdq import Svdq
from tests.gear.base_cases import normal, settings
from tests.gear.oracle_cases import to_numpy

SHRINK = [1 - 0.05 * i for i in range(9)]


def _heads(tokens: int, rank: int = 8, seed: int = 0) -> np.ndarray:
    """Return [1, 2, tokens, 64]: each head lies near a subspace of its own, off the origin."""
    rng = np.random.default_rng(seed)
    inside = rng.normal(size=(1, 2, tokens, rank)) * 4 @ rng.normal(size=(1, 2, rank, 64))
    return inside + 0.2 * rng.normal(size=(1, 2, tokens, 64)) + 3 * rng.normal(size=(1, 2, 1, 64))


def _coded(channel: np.ndarray, bits: int) -> np.ndarray:
    """Quantize one latent channel: two levels at mean ± mean distance, else a shrunk min/max."""
    if bits == 1:
        mean = channel.mean()
        return mean + np.where(channel >= mean, 1, -1) * np.abs(channel - mean).mean()
    low, high, found = channel.min(), channel.max(), []
    for factor in SHRINK:
        half = factor * (high - low) / 2
        step, start = 2 * half / (2**bits - 1), (high + low) / 2 - half
        found.append(start + step * np.clip(np.round((channel - start) / step), 0, 2**bits - 1))
    return min(found, key=lambda each: float(np.square(each - channel).sum()))


def _by_hand(x: np.ndarray, axes: np.ndarray, plan: str = "84211000") -> np.ndarray:
    """Return x [tokens, head_dim] through the first columns of ``axes`` [head_dim, head_dim]."""
    mean, each = x.mean(axis=0), x.shape[1] // len(plan)
    out = np.tile(mean, (len(x), 1))
    for channel, bits in enumerate(np.repeat([int(b) for b in plan], each)):
        if bits:
            latent = (x - mean) @ axes[:, channel]
            out += np.outer(_coded(latent, bits), axes[:, channel])
    return out


def _axes(x: np.ndarray) -> np.ndarray:
    return np.linalg.svd(x - x.mean(axis=0))[2].T


@pytest.mark.parametrize("data", ["heads", "normal"])
def test_a_block_is_the_one_made_by_hand(data: str) -> None:
    x = _heads(128) if data == "heads" else to_numpy(normal(128)).astype(np.float64)
    s = settings("svdq", sparse_frac=0.0)
    found = to_numpy(compress(mx.array(x, mx.float32), "k", s.k, s, 0).reconstruct())
    for head in range(2):
        expected = _by_hand(x[0, head], _axes(x[0, head]))
        missed = np.linalg.norm(found[0, head] - expected) / np.linalg.norm(x[0, head])
        assert missed < 0.02  # axes and ranges are fp16: now and then a code tips over
        error = np.linalg.norm(found[0, head] - x[0, head])
        assert error == pytest.approx(np.linalg.norm(expected - x[0, head]), rel=0.01)


def test_axes_per_head_beat_shared_ones() -> None:
    """Heads that lie in subspaces of their own: shared axes garble them (methods.md)."""
    x = _heads(256, rank=24)
    s = settings("svdq", sparse_frac=0.0)
    found = to_numpy(compress(mx.array(x, mx.float32), "k", s.k, s, 0).reconstruct())[0]
    together = np.concatenate([head - head.mean(axis=0) for head in x[0]])
    shared = np.stack([_by_hand(head, np.linalg.svd(together)[2].T) for head in x[0]])
    own, other = (np.linalg.norm(each - x[0]) / np.linalg.norm(x[0]) for each in (found, shared))
    assert own < 0.5 * other
    assert own < 0.2


def test_dropped_groups_take_no_bytes_and_code_bits_average_two() -> None:
    s = settings("svdq", sparse_frac=0.0)
    block = compress(normal(128), "k", s.k, s, 0)
    assert block.terms()["codes"] * 8 == 2 * 2 * 128 * 64
    assert block.arrays["axes"].shape == (1, 2, 1, 40, 64)
    assert set(block.arrays) == {
        "codes_8", "codes_4", "codes_2", "codes_1", "scale", "zero", "axes", "mean",
    }  # fmt: skip


def test_keys_alone_are_latent() -> None:
    [layer] = Svdq(settings=GearConfig(bits=4, base="vector")).layers(1)
    assert (layer.k.base, layer.v.base, layer.v.bits, layer.n_b) == ("svdq", "grouped", 4, 256)
    assert layer.k.option("schedule") == "84211000"


@pytest.mark.parametrize("plan", ["", "0000", "12", "9", "4x"])
def test_a_schedule_that_is_none_is_refused(plan: str) -> None:
    with pytest.raises(SettingError, match="schedule"):
        Svdq(schedule=plan).layers(1)
