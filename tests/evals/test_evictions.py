"""Evictions in the harness: queries beside an exact prefill, guards that know a whole budget."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from evals import guards, tiny
from evals.caches import make_caches
from evals.prefill import PrefillStore, exact_prefill, hand_over
from gear.methods.adakv import AdaKV
from gear.methods.fp16 import Fp16
from gear.methods.nestedkv import NestedKV
from gear.routing import routed

TOKENS = [(7 * i * i + 3) % 251 for i in range(80)]


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab_size": 257, "seed": 0}
    return tiny.build(sizes)


def _same(a: Any, b: Any) -> bool:
    return all(
        mx.array_equal(x, y)
        for one, other in zip(a.layers, b.layers, strict=True)
        for x, y in zip(one.keys_and_values(), other.keys_and_values(), strict=True)
    )


@pytest.mark.parametrize("chunk", [2048, 24, 40])
def test_the_last_queries_are_attentions_own_and_nothing_else_moves(
    model: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[mx.array] = []
    plain = llama.scaled_dot_product_attention

    def noting(queries: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        met.append(queries * kwargs["scale"])
        return plain(queries, *args, **kwargs)

    monkeypatch.setattr(llama, "scaled_dot_product_attention", noting)
    without = exact_prefill(model, TOKENS, chunk)
    expected = [mx.concatenate(met[i::2], axis=2)[:, :, -32:] for i in range(2)]
    met.clear()
    state = exact_prefill(model, TOKENS, chunk, window=32)
    assert _same(state, without)
    assert all(type(layer) is KVCache for layer in state.layers)
    assert (state.window, without.window, without.queries) == (32, 0, {})
    assert state.nbytes == without.nbytes + 2 * 4 * 32 * 32 * 4
    for i in range(2):
        assert mx.array_equal(state.queries[i], expected[i])


def test_queries_span_a_shared_prefix_and_short_prompts(model: Any) -> None:
    store = PrefillStore()
    whole = exact_prefill(model, TOKENS, 2048, window=32)
    state, _ = store.prefill(model, TOKENS, 2048, 70, 32)
    for i in range(2):
        assert mx.allclose(state.queries[i], whole.queries[i], atol=1e-4)
    assert exact_prefill(model, TOKENS[:5], 2048, window=32).queries[0].shape[2] == 5


def test_the_store_computes_again_what_has_no_queries(model: Any, tmp_path: Any) -> None:
    size = exact_prefill(model, TOKENS, 2048).nbytes
    other = [9, *TOKENS]
    for store in (PrefillStore(), PrefillStore(size / 2**30 / 2, tmp_path)):  # all spilled
        assert not store.prefill(model, TOKENS, 2048)[1]
        assert not store.prefill(model, other, 2048, window=8)[1]
        assert not store.prefill(model, TOKENS, 2048, window=32)[1]
        first, reused = store.prefill(model, TOKENS, 2048, window=8)
        assert reused
        assert first.queries[1].shape == (1, 4, 32, 32)
        again, reused = store.prefill(model, TOKENS, 2048)
        assert reused
        assert _same(first, again)
        assert store.prefill(model, other, 2048, window=8)[0].queries[0].shape[2] == 8


def test_an_old_file_of_queries_is_not_taken_for_ones_own(model: Any, tmp_path: Any) -> None:
    PrefillStore(1e-9, tmp_path).prefill(model, TOKENS, 2048, window=32)
    store = PrefillStore(1e-9, tmp_path)
    store.prefill(model, TOKENS[:40], 2048)
    state, reused = store.prefill(model, TOKENS[:40], 2048)
    assert (reused, state.tokens, state.window, state.queries) == (True, 40, 0, {})


def test_hand_over_brings_the_queries_that_a_streaming_prefill_meets(model: Any) -> None:
    method = AdaKV(budget=40)
    with routed(model) as route:
        one, other = (make_caches(model, method, route) for _ in range(2))
        assert (one.query_window, make_caches(model, NestedKV()).query_window) == (32, 0)
        assert make_caches(model, Fp16()).query_window == 0
        hand_over(exact_prefill(model, TOKENS, 2048, window=32), one)
        for start in range(0, 80, 30):
            model(mx.array([TOKENS[start : start + 30]]), cache=other.layers)
        other.flush()
    for a, b in zip(one.layers, other.layers, strict=True):
        assert mx.array_equal(a.kept.positions, b.kept.positions)
        assert a.kept.lengths == b.kept.lengths
    assert one.coverage == {"layers": 2, "covered_layers": 2, "packed_layers": 2}
    assert one.bytes()["tokens_compressed_min"] == 40


def test_without_queries_a_hand_over_is_refused(model: Any) -> None:
    with routed(model) as route:
        caches = make_caches(model, AdaKV(budget=40), route)
        with pytest.raises(ValueError, match="layer 0: needs the prompt's last queries"):
            hand_over(exact_prefill(model, TOKENS, 2048), caches)


def _verdicts(layer: dict[str, Any], prefill: int) -> dict[str, str]:
    config = {
        "cache": {"name": "adakv", "layers": [layer]},
        "eval": {"task": "perplexity", "protocol": "decode", "allow_uncompressed": False},
        "dtype": "float32",
    }
    sample = {
        "kv": {"tokens_compressed_min": 0}, "timing": {"prefill_tokens": prefill},
        "cache_classes": {"before": {}, "after": {}}, "document": "d", "window": 0,
    }  # fmt: skip
    metrics = {
        "kv/stored_bytes": 8.0, "kv/fp16_bytes": 8.0, "fidelity/kl_max": 0.0,
        "fidelity/top1_flip_rate": 0.0,
    }  # fmt: skip
    return guards.check(config, [sample], metrics, {"covered_layers": 1})


@pytest.mark.parametrize(
    ("budget", "share", "whole"),
    [(256, None, True), (255, None, False), (None, 1.0, True), (None, 0.5, False)],
)
def test_guards_on_compression_do_not_apply_to_a_budget_of_all_tokens(
    budget: int | None, share: float | None, whole: bool
) -> None:
    verdicts = _verdicts({"budget": budget, "budget_fraction": share, "attend": "exact"}, 256)
    for name in ("tokens_compressed", "below_fp16", "differs_from_fp16"):
        assert (verdicts[name] == guards.NOT_APPLICABLE) == whole
        assert verdicts[name].startswith("failed") != whole
