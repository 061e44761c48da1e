"""NestedKV against an fp64 oracle with loops, and what its scales see."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from gear.methods.nestedkv import NestedKV


def _scaled(x: np.ndarray) -> np.ndarray:
    return np.zeros_like(x) if x.max() == x.min() else (x - x.min()) / (x.max() - x.min())


def _oracle(keys: np.ndarray, recent: int) -> np.ndarray:
    """Return the score of one head's keys [tokens, head_dim] in fp64."""
    k = keys.astype(np.float64)
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    n, block = len(k), int(np.clip(len(k) // 32, 128, 256))
    anomalies = []
    for scale in "sec":
        a = []
        for i in range(n):
            start = i // block * block
            window = {"s": k, "e": k[start : start + block], "c": k[max(i - recent + 1, 0) : i + 1]}
            mean = window[scale].mean(axis=0)
            a.append(-(k[i] @ mean) / np.linalg.norm(mean))
        anomalies.append(_scaled(np.array(a)))
    a, top = np.array(anomalies), max(n // 10, 1)
    order = np.sort(a, axis=1)
    spread = order[:, -top:].mean(axis=1) - order[:, :top].mean(axis=1)
    w = np.array([0.4, 0.4, 0.2]) * np.exp(3.0 * spread)
    surprise = _scaled(a.std(axis=0))
    gate = 1 / (1 + np.exp(-10.0 * (surprise - surprise.mean() - 0.6)))
    return (1 - gate) * (w / w.sum() @ a) + gate * a.max(axis=0)


@pytest.mark.parametrize("tokens", [7, 100, 300, 500])
def test_scores_are_the_oracles(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    keys = (rng.normal(size=(2, 2, tokens, 16)) + rng.normal(size=(2, 2, 1, 16))).astype(np.float32)
    scores = np.array(NestedKV(recent=24).scores(mx.array(keys)))
    for b in range(2):
        for h in range(2):
            np.testing.assert_allclose(scores[b, h], _oracle(keys[b, h], 24), atol=2e-5)


def test_the_length_of_a_key_is_nothing() -> None:
    keys = np.random.default_rng(0).normal(size=(1, 1, 200, 16)).astype(np.float32)
    longer = keys * np.random.default_rng(1).uniform(0.1, 9, size=(1, 1, 200, 1))
    one, other = (
        np.array(NestedKV().scores(mx.array(k, dtype=mx.float32))) for k in (keys, longer)
    )
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_odd_keys_and_the_first_ones_are_kept() -> None:
    """A head of like keys with four odd ones: they survive a budget of an eighth, and the sinks."""
    rng = np.random.default_rng(0)
    keys = np.ones((1, 2, 400, 16)) + 0.1 * rng.normal(size=(1, 2, 400, 16))
    odd = [50, 180, 260, 390]
    keys[:, :, odd] *= -1
    chosen = NestedKV(budget=50).choose(mx.array(keys.astype(np.float32)), None, 0, 50)[0]
    assert sum(map(len, chosen)) == 100
    for places in chosen:
        assert {0, 1, 2, 3, *odd} <= set(places)
        assert len(places) >= 10


def test_equal_keys_have_finite_scores() -> None:
    for keys in (mx.ones((1, 1, 40, 8)), mx.zeros((1, 1, 40, 8))):
        assert mx.isfinite(NestedKV().scores(keys)).all()
