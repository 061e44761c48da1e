"""Exact prefills: equal in any chunks, shared without being spoiled, handed over in one call."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.llama import Model, ModelArgs

from evals import tiny
from evals.caches import make_caches
from evals.prefill import PrefillStore, exact_prefill, hand_over
from gear.config import GearConfig
from gear.methods.fp16 import Fp16
from gear.methods.gear import Gear

TOKENS = [(7 * i * i + 3) % 251 for i in range(80)]


@pytest.fixture(scope="module")
def model():
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab_size": 257, "seed": 0}
    return tiny.build(sizes)


def _sliding_model() -> Model:
    args = ModelArgs(
        model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=64,
        num_attention_heads=2, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=257,
        layer_types=["full_attention", "sliding_attention"], sliding_window=16,
    )  # fmt: skip
    mx.random.seed(0)
    return Model(args)


def _gear() -> Gear:
    return Gear(settings=GearConfig(group_size=32, n_b=32))


def test_chunks_change_only_the_last_digits(model):
    whole, chunked = exact_prefill(model, TOKENS, 2048), exact_prefill(model, TOKENS, 24)
    assert whole.tokens == chunked.tokens == len(TOKENS)
    for a, b in zip(whole.layers, chunked.layers, strict=True):
        for x, y in zip(a.keys_and_values(), b.keys_and_values(), strict=True):
            assert x.shape[2] == len(TOKENS)
            assert mx.allclose(x, y, atol=1e-4)


def test_hand_over_compresses_the_whole_prefill_at_once(model):
    state, caches = exact_prefill(model, TOKENS, 2048), make_caches(model, _gear())
    hand_over(state, caches)
    for cache, exact in zip(caches.layers, state.layers, strict=True):
        keys, values = exact.keys_and_values()
        assert (cache.offset, cache.tokens_compressed, cache.buffered_tokens) == (80, 64, 16)
        rebuilt_k, rebuilt_v = cache.reconstruct()
        assert mx.array_equal(rebuilt_k[:, :, 64:], keys[:, :, 64:])
        assert mx.array_equal(rebuilt_v[:, :, 64:], values[:, :, 64:])
        assert not mx.allclose(rebuilt_k[:, :, :64], keys[:, :, :64], atol=1e-3)


@pytest.mark.parametrize("method", [Fp16(), _gear()])
def test_a_prefill_serves_many_caches_unspoiled(model, method):
    state = exact_prefill(model, TOKENS, 2048)
    before = [mx.array(k) for k in state.layers[0].keys_and_values()]
    logits = []
    for _ in range(2):
        caches = make_caches(model, method)
        hand_over(state, caches)
        logits.append(model(mx.array([TOKENS[:40]]), cache=caches.layers))
        assert caches.layers[0].offset == 120
    assert mx.array_equal(*logits)
    assert state.layers[0].offset == 80
    for old, new in zip(before, state.layers[0].keys_and_values(), strict=True):
        assert mx.array_equal(old, new)


def test_fp16_continues_a_handed_over_prefill_as_one_pass_would(model):
    state, caches = exact_prefill(model, TOKENS[:64], 2048), make_caches(model, Fp16())
    hand_over(state, caches)
    calls = model(mx.array([TOKENS[64:]]), cache=caches.layers)
    assert mx.allclose(calls, model(mx.array([TOKENS]))[:, 64:], atol=1e-3)


def test_a_layer_the_method_does_not_cover_keeps_a_copy_of_its_native_cache():
    model = _sliding_model()
    state = exact_prefill(model, TOKENS, 2048)
    logits = []
    for _ in range(2):
        caches = make_caches(model, _gear())
        hand_over(state, caches)
        assert caches.covered == [0]
        native = caches.layers[1]
        assert type(native) is RotatingKVCache
        assert native is not state.layers[1]
        logits.append(model(mx.array([TOKENS[:4]]), cache=caches.layers))
        assert native.offset == 84
    assert mx.array_equal(*logits)
    assert state.layers[1].offset == 80


class _Counting:
    """A model that counts calls."""

    def __init__(self, model) -> None:
        self.model, self.layers, self.calls = model, model.layers, 0

    def __call__(self, tokens, cache=None):
        self.calls += 1
        return self.model(tokens, cache=cache)


def test_store_computes_once_per_tokens_and_chunk(model):
    store, counting = PrefillStore(), _Counting(model)
    first, reused = store.prefill(counting, TOKENS, 64)
    assert (reused, counting.calls) == (False, 2)
    again, reused = store.prefill(counting, list(TOKENS), 64)
    assert (reused, counting.calls) == (True, 2)
    assert again is first
    assert store.prefill(counting, TOKENS, 2048)[1] is False
    assert store.prefill(counting, TOKENS[:-1], 64)[1] is False
    assert isinstance(first.layers[0], KVCache)


def test_store_drops_the_least_recently_used_over_its_bound(model):
    size = exact_prefill(model, TOKENS, 2048).nbytes
    assert size > 0
    store = PrefillStore(2 * size / 2**30)
    prompts = [[i, *TOKENS[1:]] for i in range(3)]
    store.prefill(model, prompts[0], 2048)
    store.prefill(model, prompts[1], 2048)
    assert store.prefill(model, prompts[0], 2048)[1]
    store.prefill(model, prompts[2], 2048)
    assert store.nbytes == 2 * size
    assert store.prefill(model, prompts[0], 2048)[1]
    assert not store.prefill(model, prompts[1], 2048)[1]


def test_store_returns_what_it_cannot_keep(model):
    store = PrefillStore(10 / 2**30)
    state, reused = store.prefill(model, TOKENS, 2048)
    assert state.tokens == 80
    assert not reused
    assert store.nbytes == 0


def test_what_is_spilled_comes_back_as_it_was(model, tmp_path):
    size = exact_prefill(model, TOKENS, 2048).nbytes
    store, counting = PrefillStore(size / 2**30, tmp_path), _Counting(model)
    prompts = [[i, *TOKENS[1:]] for i in range(3)]
    first = [store.prefill(counting, prompt, 2048)[0] for prompt in prompts]
    assert counting.calls == 3
    for prompt, state in zip(prompts, first, strict=True):
        back, reused = store.prefill(counting, prompt, 2048)
        assert (reused, back.tokens) == (True, len(TOKENS))
        for a, b in zip(state.layers, back.layers, strict=True):
            pairs = zip(a.keys_and_values(), b.keys_and_values(), strict=True)
            assert all(mx.array_equal(x, y) for x, y in pairs)
    assert counting.calls == 3
    assert store.nbytes <= size
    assert len(list(tmp_path.iterdir())) == 3


def _same_layers(one, other) -> bool:
    pairs = zip(one.layers, other.layers, strict=True)
    return all(
        mx.allclose(x, y, atol=1e-4)
        for a, b in pairs
        for x, y in zip(a.keys_and_values(), b.keys_and_values(), strict=True)
    )


def test_a_shared_prefix_is_computed_once(model):
    store, counting = PrefillStore(), _Counting(model)
    prompts = [[*TOKENS[:50], i, *TOKENS[51:]] for i in range(4)]
    for i, prompt in enumerate(prompts):
        state, reused = store.prefill(counting, prompt, 2048, shared=50)
        assert (reused, state.tokens, state.given) == (False, 80, 50 if i else 0)
        assert counting.calls == 2 + i  # the prefix, and then one rest each
        assert _same_layers(state, exact_prefill(model, prompt, 2048))
    assert store.prefill(counting, prompts[0], 2048, shared=50)[1]
    assert not store.prefill(counting, prompts[0], 2048)[1]
    assert counting.calls == 6
    assert store.prefill(counting, TOKENS[:50], 2048)[1]  # the prefix is a prefill like any other
    assert store.prefill(counting, TOKENS[:50], 2048, shared=50)[1]


def test_a_prefix_of_a_sliding_window_is_continued_right():
    model, store = _sliding_model(), PrefillStore()
    whole = exact_prefill(model, TOKENS, 2048)
    for shared in (8, 16, 50, 79):
        for _ in range(2):
            state, _ = store.prefill(model, TOKENS, 2048, shared)
            logits = []
            for start in (state, whole):
                caches = make_caches(model, Fp16())
                hand_over(start, caches)
                logits.append(model(mx.array([TOKENS[:4]]), cache=caches.layers))
            assert mx.allclose(*logits, atol=1e-4)


@pytest.mark.parametrize("room", [1, 2])  # in prefills, the prefix included
def test_prompts_do_not_push_out_the_prefix_they_share(model, room):
    size = exact_prefill(model, TOKENS, 2048).nbytes
    store, counting = PrefillStore(room * size / 2**30), _Counting(model)
    for i in range(5):
        store.prefill(counting, [*TOKENS[:50], i, *TOKENS[51:]], 2048, shared=50)
        assert store.nbytes == min(room, i + 2) * size
    assert counting.calls == 6
    assert store.prefill(counting, TOKENS[:50], 2048)[1]


def test_a_prefill_without_room_pushes_no_other_out(model):
    small = exact_prefill(model, TOKENS[:20], 2048).nbytes
    assert exact_prefill(model, TOKENS * 4, 2048).nbytes > small
    store = PrefillStore(small / 2**30)
    store.prefill(model, TOKENS[:20], 2048)
    store.prefill(model, TOKENS * 4, 2048)
    assert store.prefill(model, TOKENS[:20], 2048)[1]


@pytest.mark.parametrize("shared", [-1, 81])
def test_a_prefix_is_a_part_of_the_prompt(model, shared):
    with pytest.raises(ValueError, match=rf"shared={shared}: must be from 0"):
        PrefillStore().prefill(model, TOKENS, 2048, shared)
