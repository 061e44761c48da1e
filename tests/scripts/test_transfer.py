"""Transfer of a cache: RoPE is taken back exactly, maps of a linear relation are found."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from evals import tiny
from scripts import transfer


def test_keys_go_back_to_before_rope_and_a_whole_cache_goes_on_as_its_own() -> None:
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab_size": 257, "seed": 0}
    model, tokens = tiny.build(sizes), [5] * 20 + [9, 8, 7]
    k, v = transfer.cache_of(model, tokens[:20])
    np.testing.assert_allclose(k[0, :, 19], k[0, :, 0], atol=1e-4)  # one token, no position left
    whole = model(mx.array([tokens]))[0, 20:]
    expected = whole - mx.logsumexp(whole, axis=-1, keepdims=True)
    np.testing.assert_allclose(transfer.log_probs(model, (k, v), tokens[20:]), expected, atol=1e-3)


def test_a_linear_relation_is_found_and_held_out_text_follows_it() -> None:
    rng = np.random.default_rng(0)
    source = [tuple(rng.normal(size=(2, 3, 60, 4)) for _ in "kv") for _ in range(4)]
    mix = rng.normal(size=(24, 10))  # of K and V of the source's layer to 2 heads of 5 channels

    def target(cache: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        wide = [np.concatenate([transfer._wide(s[i]) for s in cache], axis=1) @ mix for i in (0, 1)]
        side = np.stack([w.reshape(60, 2, 5).transpose(1, 0, 2) for w in wide])
        return side, side + 1

    exact = [target(c) for c in source]
    maps = transfer.Maps.fit(source[:3], exact[:3], around=0, penalty=1e-9)
    for made, seen in zip(maps.apply(source[3], exact[3]), exact[3], strict=True):
        assert transfer.error(made, seen) < 1e-4
    assert transfer.error(np.broadcast_to(maps.means[0], exact[3][0].shape), exact[3][0]) > 0.9
