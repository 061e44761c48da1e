"""The cache of the evicting methods: what it attends to, holds, trims, saves and refuses."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, save_prompt_cache

import gear
from evals import tiny
from gear.attention import Packed
from gear.choice import shared, uniform
from gear.errors import NonFiniteError
from gear.evicting import EvictingCache
from gear.generation import fresh_caches
from gear.methods.adakv import AdaKV
from gear.methods.eviction import Eviction
from gear.methods.nestedkv import NestedKV
from gear.methods.qfilters import QFilters
from gear.routing import Route, native_caches, routed

TOKENS = [(7 * i * i + 3) % 251 for i in range(90)]
HEADS, KV_HEADS, DIM = 4, 2, 16


@dataclass
class _Drawn(Eviction):
    """Keeps what a seed draws: as many a head, or with ``uneven`` not."""

    uneven: bool = True
    name: ClassVar[str] = "nestedkv"  # a name that a saved cache finds

    def choose(self, keys: mx.array, queries: Any, layer: int, budget: int) -> Any:
        draw = np.random.default_rng(layer).normal(size=keys.shape[:3])
        draw[:, 0] += 1.0  # so that head 0 wins more of a shared budget
        return shared(draw, budget, 0.2) if self.uneven else uniform(draw, budget)


def _normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def _filled(method: Eviction, tokens: int = 60, batch: int = 2, route: bool = True) -> Any:
    """Return a cache after its eviction, and the prompt's K and V."""
    cache = EvictingCache(method, layer=3)
    if route:
        cache.route = Route(frozenset({3}), 64)
    k, v = _normal(1, batch, KV_HEADS, tokens, DIM), _normal(2, batch, KV_HEADS, tokens, DIM)
    cache.update_and_fetch(k, v)
    cache.flush()
    return cache, k, v


def _positions(cache: EvictingCache) -> list[list[np.ndarray]]:
    """Return the kept places by row and head, read from the flat storage."""
    assert cache.kept is not None
    flat, rows = list(np.array(cache.kept.positions)), []
    for lengths in cache.kept.lengths:
        rows.append([np.array([flat.pop(0) for _ in range(n)], dtype=int) for n in lengths])
    assert not flat
    return rows


def _oracle(cache: Any, q: Any, k: Any, v: Any, n: int, extra: Any = None) -> np.ndarray:
    """Attend in fp64 to kept and later tokens; ``extra`` [n, tokens] is added to the logits."""
    q, k, v = (np.array(a, dtype=np.float64) for a in (q, k, v))
    tokens, group, out = k.shape[2], HEADS // KV_HEADS, np.zeros(q.shape)
    for b, row in enumerate(_positions(cache)):
        for h in range(HEADS):
            own = np.concatenate([row[h // group], np.arange(cache.kept.tokens, tokens)])
            for i in range(n):
                seen = own[own <= tokens - n + i]
                logits = k[b, h // group, seen] @ q[b, h, i] * 0.3
                if extra is not None:
                    logits = logits + np.array(extra, dtype=np.float64)[i, seen]
                weight = np.exp(logits - logits.max())
                out[b, h, i] = weight / weight.sum() @ v[b, h // group, seen]
    return out


@pytest.mark.parametrize("uneven", [True, False])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("kind", ["plain", "bool", "additive"])
def test_attention_is_over_kept_and_later_tokens(uneven: bool, n: int, kind: str) -> None:
    cache, k, v = _filled(_Drawn(budget=20, uneven=uneven))
    assert cache.kept.even != uneven
    for new in (3, n):  # tokens between the prompt and the queries
        more = _normal(5 + new, 2, KV_HEADS, new, DIM), _normal(9 + new, 2, KV_HEADS, new, DIM)
        handles = cache.update_and_fetch(*more)
        k, v = (mx.concatenate([a, b], axis=2) for a, b in zip((k, v), more, strict=True))
    assert all(isinstance(h, Packed) and h.shape == k.shape for h in handles)
    q = _normal(4, 2, HEADS, n, DIM)
    tokens = k.shape[2]
    causal = mx.arange(tokens) <= mx.arange(tokens - n, tokens)[:, None]
    mask, extra = (None if n == 1 else "causal"), None
    if kind == "bool":
        mask = causal & (mx.arange(tokens) % 7 != 2)
        extra = mx.where(mask, 0, -mx.inf)
    if kind == "additive":
        extra = _normal(8, n, tokens)
        mask = mx.where(causal, extra, -mx.inf)
    seen = handles[0].attend(q, 0.3, mask, None)
    np.testing.assert_allclose(seen, _oracle(cache, q, k, v, n, extra), atol=2e-5)


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab_size": 257, "seed": 0}
    return tiny.build(sizes)


class _Hiding(KVCache):
    """An exact cache whose attention hides what another cache evicted."""

    def __init__(self, other: EvictingCache) -> None:
        super().__init__()
        self.other = other

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        super().update_and_fetch(keys, values)
        both: Any = super().keys_and_values()
        k, v = both

        def attend(q: mx.array, scale: float, mask: Any, _: Any) -> mx.array:
            if self.other.kept is not None and q.shape[2] < 10:  # behind the prompt
                hidden = np.ones((HEADS, self.offset), dtype=bool)
                hidden[:, self.other.kept.tokens :] = False
                for h in range(HEADS):
                    hidden[h, _positions(self.other)[0][h // 2]] = False
                last = mx.arange(self.offset - q.shape[2], self.offset)[:, None]
                mask = (mx.arange(self.offset) <= last) & ~mx.array(hidden)[None, :, None]
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

        return Packed(k.shape, k.dtype, attend), Packed(v.shape, v.dtype, attend)


@pytest.mark.parametrize("method", [_Drawn(budget=30), AdaKV(budget=40), QFilters(budget=30)])
def test_a_model_goes_on_at_the_right_positions(model: Any, method: Eviction) -> None:
    with routed(model) as route:
        caches = fresh_caches(model, method, route)
        exact: list[Any] = [_Hiding(c) for c in caches]
        for layers in (caches, exact):
            model(mx.array([TOKENS]), cache=layers)
        for cache in caches:
            cache.flush()
            assert cache.offset == len(TOKENS)
            assert cache.kept.evicted == len(TOKENS) - method.budget
        for fed in ([5], [9, 40, 7], [3]):
            seen, expected = (model(mx.array([fed]), cache=c) for c in (caches, exact))
            assert mx.allclose(seen, expected, atol=1e-4)
        assert [c.offset for c in caches] == [len(TOKENS) + 5] * 2


@pytest.mark.parametrize("cls", [QFilters, AdaKV, NestedKV])
@pytest.mark.parametrize("options", [{"budget": 90}, {"budget": 500}, {"budget_fraction": 1.0}])
def test_a_budget_of_all_tokens_is_the_exact_cache(model: Any, cls: Any, options: Any) -> None:
    with routed(model) as route:
        caches = fresh_caches(model, cls(**options), route)
        exact = native_caches(model)
        for fed in (TOKENS, [5], [9, 40, 7]):
            seen, expected = (model(mx.array([fed]), cache=c) for c in (caches, exact))
            assert mx.array_equal(seen, expected)
            for cache in caches:
                cache.flush()
    size = caches[0].cache_bytes()
    assert (size.tokens_compressed, size.accounted, size.stored) == (0, 0, size.fp16)


def test_generation_evicts_at_its_first_single_token(model: Any) -> None:
    with gear.compressed(model, AdaKV(budget=40)):
        caches = model.make_cache()
        for part in (TOKENS[:50], TOKENS[50:]):  # a prompt in parts sees all of itself
            model(mx.array([part]), cache=caches)
        assert all(c.kept is None and c.query_window == 32 for c in caches)
        whole = native_caches(model)
        model(mx.array([TOKENS]), cache=whole)
        assert mx.allclose(caches[1].reconstruct()[0], whole[1].keys_and_values()[0], atol=1e-4)
        for token in (5, 6, 7):
            model(mx.array([[token]]), cache=caches)
    for cache in caches:
        assert cache.kept.tokens == 90
        assert len(cache.exact) == 3
        assert cache.queries.array is None


def test_bytes_are_those_of_kept_tokens_positions_and_the_tail() -> None:
    cache, _, _ = _filled(_Drawn(budget=20))
    cache.update_and_fetch(_normal(3, 2, KV_HEADS, 4, DIM), _normal(4, 2, KV_HEADS, 4, DIM))
    size = cache.cache_bytes()
    kept = 2 * KV_HEADS * 20
    assert sum(map(len, cache.kept.lengths)) * 20 == kept == cache.kept.positions.size
    assert size.terms["codes"] == size.accounted == 2 * kept
    assert size.terms["exact"] == size.buffer == 2 * 2 * DIM * (kept + 2 * KV_HEADS * 4)
    assert size.fp16 == 2 * 2 * 2 * KV_HEADS * 64 * DIM
    assert size.held == 2 * size.buffer + size.accounted  # fp32 here
    assert (size.tokens, size.tokens_compressed) == (64, 40)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_share_of_the_bytes_has_the_positions_in_it(share: float) -> None:
    cache, _, _ = _filled(_Drawn(budget_fraction=share), tokens=600)
    size = cache.cache_bytes()
    assert size.stored <= share * size.fp16 < size.stored + 2 * 2 * 2 * KV_HEADS * DIM * 2


def test_dense_k_and_v_have_zeros_where_a_token_is_gone() -> None:
    cache, k, _ = _filled(_Drawn(budget=20))
    dense, _ = cache.reconstruct()
    for b, row in enumerate(_positions(cache)):
        for h, places in enumerate(row):
            gone = np.setdiff1d(np.arange(60), places)
            assert mx.array_equal(dense[b, h][mx.array(places)], k[b, h][mx.array(places)])
            assert not dense[b, h][mx.array(gone)].any()


def test_what_follows_the_prompt_is_never_evicted() -> None:
    cache, _, _ = _filled(_Drawn(budget=20))
    before = cache.kept.positions
    for i in range(70):
        cache.update_and_fetch(_normal(i, 2, KV_HEADS, 1, DIM), _normal(i, 2, KV_HEADS, 1, DIM))
        cache.flush()
    assert mx.array_equal(cache.kept.positions, before)
    assert (len(cache.exact), cache.offset) == (70, 130)


def test_trim_forgets_later_tokens_then_kept_ones_then_all() -> None:
    cache, _, _ = _filled(_Drawn(budget=20))
    cache.update_and_fetch(_normal(3, 2, KV_HEADS, 4, DIM), _normal(4, 2, KV_HEADS, 4, DIM))
    before = _positions(cache)
    assert cache.trim(3) == 3
    assert (cache.offset, len(cache.exact)) == (61, 1)
    assert cache.trim(11) == 11
    assert cache.offset == cache.kept.tokens == 50
    for old, new in zip(before, _positions(cache), strict=True):
        for a, b in zip(old, new, strict=True):
            assert np.array_equal(a[a < 50], b)
    assert cache.reconstruct()[0].shape[2] == 50
    q = _normal(4, 2, HEADS, 1, DIM)
    more = _normal(6, 2, KV_HEADS, 1, DIM), _normal(7, 2, KV_HEADS, 1, DIM)
    assert mx.isfinite(cache.update_and_fetch(*more)[0].attend(q, 0.3, None, None)).all()
    assert cache.trim(1000) == 51
    assert cache.empty()
    assert not cache.prefilled
    assert cache.cache_bytes().held == 0


@pytest.mark.parametrize("evicted", [True, False])
def test_save_load_and_deepcopy_go_on_alike(tmp_path: Path, evicted: bool) -> None:
    cache = EvictingCache(AdaKV(budget=30, window=8), 3)
    cache.route = Route(frozenset({3}), 64)
    k, v = _normal(1, 1, KV_HEADS, 60, DIM), _normal(2, 1, KV_HEADS, 60, DIM)
    cache.observe(_normal(3, 1, HEADS, 60, DIM))
    cache.update_and_fetch(k, v)
    if evicted:
        cache.flush()
    save_prompt_cache(str(tmp_path / "c.safetensors"), [cache])
    (loaded,) = gear.load_prompt_cache(tmp_path / "c.safetensors")
    assert type(loaded) is EvictingCache
    assert loaded.method == cache.method
    loaded.route = cache.route
    more = _normal(6, 1, KV_HEADS, 2, DIM), _normal(7, 1, KV_HEADS, 2, DIM)
    seen = []
    for one in (copy.deepcopy(cache), loaded, cache):
        one.flush()
        handles = one.update_and_fetch(*more)
        seen.append(handles[0].attend(_normal(4, 1, HEADS, 2, DIM), 0.3, "causal", None))
    assert mx.array_equal(seen[0], seen[2])
    assert mx.array_equal(seen[1], seen[2])
    state = cache.state
    state[0] = 99
    with pytest.raises(ValueError, match="state version 99"):
        EvictingCache.from_state(state)


def test_what_it_refuses() -> None:
    cache, _, _ = _filled(_Drawn(budget=20), route=False)
    new = _normal(1, 2, KV_HEADS, 1, DIM)
    with pytest.raises(ValueError, match="must run through an open route"):
        cache.update_and_fetch(new, new)
    assert cache.offset == 60  # nothing was taken in
    with pytest.raises(ValueError, match="kv_bits"):
        _ = cache.to_quantized
    assert not hasattr(cache, "merge")
    assert not hasattr(cache, "bits")
    with pytest.raises(ValueError, match="needs the prompt's last queries"):
        _filled(QFilters(budget=20))
    with pytest.raises(ValueError, match="with equal batch"):
        cache.update_and_fetch(new[0], new)
    broken = EvictingCache(_Drawn(budget=2), 4)
    k = mx.where(mx.arange(8)[:, None] == 3, mx.nan, _normal(1, 1, 2, 8, 4))
    broken.update_and_fetch(k, k)
    with pytest.raises(NonFiniteError, match="layer 4"):
        broken.flush()


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (QFilters(budget=0), "cache.budget=0: must be an integer of at least 1"),
        (QFilters(budget_fraction=0.0), "cache.budget_fraction=0: must be above 0"),
        (QFilters(budget_fraction=1.5), r"cache.budget_fraction=1.5: must be a number in \[0, 1\]"),
        (QFilters(window=0), "cache.window=0"),
        (QFilters(calibration="no/such"), "cache.calibration='no/such'"),
        (AdaKV(budget=32), "cache.window=32: must be below cache.budget=32"),
        (AdaKV(pool=4), "cache.pool=4: must be odd"),
        (AdaKV(floor=-0.1), "cache.floor=-0.1"),
        (NestedKV(budget=4), "cache.sinks=4: must be below"),
        (NestedKV(beta=float("nan")), "cache.beta=nan"),
        (NestedKV(recent=0), "cache.recent=0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(method: Eviction, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        method.plan(2)


def test_a_shared_budget_is_spent_whole_and_has_a_floor() -> None:
    draw = np.random.default_rng(0).normal(size=(2, 3, 50))
    draw[:, 0] += 10  # head 0 would take all
    for row, scores in zip(shared(draw, 12, 0.25), draw, strict=True):
        assert [len(places) for places in row] == [30, 3, 3]
        for places, head in zip(row, scores, strict=True):
            assert set(places) == set(np.argsort(-head)[: len(places)])
            assert list(places) == sorted(places)
    assert [len(places) for places in shared(draw, 50, 0.2)[0]] == [50, 50, 50]
    assert list(uniform(np.ones((1, 1, 9)), 4)[0][0]) == [0, 1, 2, 3]  # ties: earlier first
