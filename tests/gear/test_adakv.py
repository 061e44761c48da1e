"""Ada-KV against an fp64 oracle with loops, and what sharing a budget is for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from gear.methods.adakv import AdaKV, pooled, window_attention

B, KV, GROUP, N, D, WINDOW = 2, 3, 2, 70, 16, 8


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(B, KV, N, D))
    queries = rng.normal(size=(B, KV, GROUP, WINDOW, D)) * np.array([0.2, 1, 3]).reshape(3, 1, 1, 1)
    return keys.astype(np.float32), queries.astype(np.float32)


def _attention(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the mean causal attention of the last queries, in fp64."""
    out = np.zeros((B, KV, N))
    for b, h, g, i in np.ndindex(B, KV, GROUP, WINDOW):
        seen = N - WINDOW + i + 1
        logits = keys[b, h, :seen].astype(np.float64) @ queries[b, h, g, i].astype(np.float64)
        weight = np.exp(logits - logits.max())
        out[b, h, :seen] += weight / weight.sum() / (GROUP * WINDOW)
    return out


def _pooled(scores: np.ndarray, pool: int) -> np.ndarray:
    side = pool // 2
    return np.array([scores[max(j - side, 0) : j + side + 1].max() for j in range(len(scores))])


def test_attention_of_the_window_is_causal() -> None:
    keys, queries = _data()
    seen = np.array(window_attention(mx.array(keys), mx.array(queries)))
    np.testing.assert_allclose(seen, _attention(keys, queries), atol=1e-6)
    np.testing.assert_allclose(seen.sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize(("pool", "floor"), [(7, 0.2), (1, 0.0), (3, 1.0)])
def test_choice_is_the_oracles(pool: int, floor: float) -> None:
    keys, queries = _data()
    budget, before = 20, N - WINDOW
    method = AdaKV(budget=budget, window=WINDOW, pool=pool, floor=floor)
    chosen = method.choose(mx.array(keys), mx.array(queries), 0, budget)
    scores, free = _attention(keys, queries), budget - WINDOW
    for b in range(B):
        heads = [_pooled(scores[b, h, :before], pool) for h in range(KV)]
        kept = {
            (h, j)
            for h in range(KV)
            for j in np.argsort(-heads[h], kind="stable")[: int(floor * free)]
        }
        rest = [
            (-heads[h][j], h, j) for h in range(KV) for j in range(before) if (h, j) not in kept
        ]
        kept |= {(h, j) for _, h, j in sorted(rest)[: KV * free - len(kept)]}
        for h in range(KV):
            own = sorted(j for head, j in kept if head == h)
            assert list(chosen[b][h]) == [*own, *range(before, N)]
        assert sum(map(len, chosen[b])) == KV * budget


def test_a_head_that_attends_widely_gets_more() -> None:
    """Head 0 looks at 30 tokens alike, heads 1 and 2 at one: the shared budget follows."""
    keys = np.zeros((1, KV, N, D), dtype=np.float32)
    keys[0, 0, 10:40, 0] = keys[0, 1:, 20, 0] = 9
    queries = np.zeros((1, KV, GROUP, WINDOW, D), dtype=np.float32)
    queries[..., 0] = 1
    method = AdaKV(budget=24, window=WINDOW, pool=1)
    chosen = method.choose(mx.array(keys), mx.array(queries), 0, 24)[0]
    assert set(range(10, 40)) <= set(chosen[0])
    assert all(20 in places for places in chosen)
    assert all(len(places) >= WINDOW + int(0.2 * (24 - WINDOW)) for places in chosen)
    attention = np.array(window_attention(mx.array(keys), mx.array(queries)))[0]
    even = [np.sort(a[: N - WINDOW])[-(24 - WINDOW) :].sum() for a in attention]
    own = [a[c[c < N - WINDOW]].sum() for a, c in zip(attention, chosen, strict=True)]
    assert sum(own) > sum(even) + 0.3  # the attention that survives


def test_pooling_brings_a_tokens_neighbours() -> None:
    scores = np.zeros((1, 1, 11))
    scores[0, 0, 5] = 1
    assert list(np.flatnonzero(pooled(scores, 7)[0, 0])) == [2, 3, 4, 5, 6, 7, 8]


def test_a_budget_below_the_window_keeps_the_newest_tokens() -> None:
    keys, queries = _data()
    chosen = AdaKV(budget_fraction=0.1, window=WINDOW).choose(
        mx.array(keys), mx.array(queries), 0, 6
    )
    assert all(list(places) == list(range(N - 6, N)) for row in chosen for places in row)
