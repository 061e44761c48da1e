"""skvq: order, clipped groups and window against fp64 by hand."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gear import GearCache, GearConfig, resolve
from gear.codec import compress
from gear.methods.skvq import Skvq
from tests.gear.base_cases import miss
from tests.gear.oracle_cases import to_numpy

ALPHAS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)


def _uneven(tokens: int, seed: int = 0) -> np.ndarray:
    """Return [1, 2, tokens, 128] whose channels differ in range, in no order."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(1, 2, tokens, 128)) * rng.permutation(np.geomspace(0.1, 10, 128))


def _by_hand(x: np.ndarray, bits: int, group: int) -> np.ndarray:
    """SKVQ of one head [tokens, head_dim] in fp64: order, clip, round, put back."""
    order = np.argsort(np.ptp(x, axis=0), kind="stable")
    cells = x[:, order].reshape(len(x), -1, group)
    low, high = cells.min(-1, keepdims=True), cells.max(-1, keepdims=True)
    best, least = cells, np.full(low.shape, np.inf)
    for alpha in ALPHAS:
        half = alpha * (high - low) / 2
        zero, scale = (low + high) / 2 - half, 2 * half / (2**bits - 1)
        found = np.clip(np.rint((cells - zero) / scale), 0, 2**bits - 1) * scale + zero
        error = np.square(found - cells).sum(-1, keepdims=True)
        best, least = np.where(error < least, found, best), np.minimum(error, least)
    back = np.empty_like(x)
    back[:, order] = best.reshape(x.shape)
    return back


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("side", ["k", "v"])
def test_skvq_is_what_one_computes_by_hand(side: str, bits: int) -> None:
    x, s = _uneven(64), Skvq(GearConfig(), bits=bits).layers(1)[0]
    block = compress(mx.array(x.astype(np.float32)), side, s.k, s, 0)
    order = to_numpy(block.arrays["order"])[:, :, 0]
    assert np.array_equal(order, np.argsort(np.ptp(x, axis=2), axis=-1))
    found = to_numpy(block.reconstruct())
    expected = np.stack([[_by_hand(head, bits, 32) for head in x[0]]])
    near = np.abs(found - expected) < 0.01 * np.abs(x).max(axis=(2, 3), keepdims=True)
    assert near.mean() > 0.99  # the others: a tie, or another factor by a rounding of fp16
    error, least = np.linalg.norm(found - x), np.linalg.norm(expected - x)
    assert error == pytest.approx(least, rel=2e-3)


def _channel_error(x: mx.array, found: mx.array) -> float:
    """Return the mean over channels of each one's relative error: small channels count too."""
    miss, size = (np.linalg.norm(to_numpy(a), axis=2) for a in (found - x, x))
    return float((miss / size).mean())


def test_order_and_clipping_each_pay() -> None:
    x = mx.array(_uneven(64, 3).astype(np.float32))
    numbers: dict[str, Any] = {"bits": 2, "group_size": 32, "rank": 0, "sparse_frac": 0.0}
    errors = []
    for config in (
        GearConfig(base="skvq", **numbers),
        GearConfig(base="per_token", clip=True, **numbers),
        GearConfig(base="per_token", **numbers),
    ):
        s = resolve(config, 1)[0]
        found = compress(x, "k", s.k, s, 0).reconstruct()
        errors.append((_channel_error(x, found), miss(x, found)))
    ordered, clipped, plain = errors
    assert ordered[0] < 0.5 * clipped[0]
    assert clipped[1] < 0.9 * plain[1]


def test_sinks_and_window_stay_exact() -> None:
    method = Skvq(GearConfig(n_sink=0))
    assert (method.recent_tokens(), method.settings.n_sink, method.block_tokens()) == (128, 5, 64)
    x = mx.array(_uneven(400).astype(np.float32))
    cache = GearCache(method.layers(1)[0])
    cache.update_and_fetch(x, x)
    cache.flush()
    found = cache.reconstruct()[0]
    assert cache.tokens_compressed == 256
    assert mx.array_equal(found[:, :, :5], x[:, :, :5])
    assert mx.array_equal(found[:, :, -128:], x[:, :, -128:])
    assert not mx.array_equal(found[:, :, 5:261], x[:, :, 5:261])
