"""GearCache: the rule of time, what a pass sees, trimming, bytes, and no dense copy."""

from __future__ import annotations

import copy
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import save_prompt_cache

from gear import GearCache, GearConfig, NonFiniteError, load_prompt_cache, resolve
from gear.codec import compress
from gear.config import LayerSettings

PRESETS = {
    "gear": {},
    "kcvt": {"base": "vector", "bits": 4, "rank": 0, "rank_decode": 0, "sparse_frac": 0.0},
    "port order": {"outlier_stage": "post_lowrank"},
    "sinks and recent": {"n_sink": 4, "recent": 10},
    "cheap terms": {"factor_bits": 4, "scale_bits": 8, "outlier_bits": 8, "clip": True},
}


def _settings(**kwargs: object) -> LayerSettings:
    return resolve(GearConfig(**kwargs), 1)[0]  # type: ignore[arg-type]


def _kv(tokens: int, heads: int = 2, batch: int = 1) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((batch, heads, tokens, 64), key=mx.random.key(1))
    values = mx.random.normal((batch, heads, tokens, 48), key=mx.random.key(2))
    return keys, values


def _feed(cache: GearCache, kv: tuple[mx.array, mx.array], calls: list[int]) -> GearCache:
    """Feed the tokens in calls of the given sizes, checking what each call returns."""
    keys, values = kv
    start = cache.offset
    for n in calls:
        seen_k, seen_v = cache.update_and_fetch(
            keys[:, :, start : start + n], values[:, :, start : start + n]
        )
        start += n
        assert seen_k.shape == (*keys.shape[:2], start, 64)
        assert seen_v.shape == (*keys.shape[:2], start, 48)
        assert mx.array_equal(seen_k[:, :, start - n :], keys[:, :, start - n : start])
        assert mx.array_equal(seen_v[:, :, start - n :], values[:, :, start - n : start])
    return cache


def _equal(one: GearCache, other: GearCache) -> bool:
    """Say whether two caches hold bit-identical arrays in the same segments."""
    if [(s.tokens, s.valid, s.k.count) for s in one.segments] != [
        (s.tokens, s.valid, s.k.count) for s in other.segments
    ]:
        return False
    for a, b in zip(one.segments, other.segments, strict=True):
        for x, y in ((a.k, b.k), (a.v, b.v)):
            if any(not mx.array_equal(x.arrays[n], y.arrays[n]).item() for n in x.arrays):
                return False
    return all(
        mx.array_equal(x, y).item()
        for x, y in zip(one.reconstruct(), other.reconstruct(), strict=True)
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_chunks_and_single_tokens_meet_the_same_states(preset: str) -> None:
    settings, kv = _settings(**PRESETS[preset]), _kv(420)
    single = _feed(GearCache(settings), kv, [200] + [1] * 220)
    chunked = _feed(GearCache(settings), kv, [200])
    chunked.flush()
    _feed(chunked, kv, [settings.n_b + settings.recent - chunked.buffered_tokens])
    while chunked.offset < 420:
        _feed(chunked, kv, [min(settings.n_b, 420 - chunked.offset)])
    single.flush()
    chunked.flush()
    assert single.tokens_compressed > 200
    assert _equal(single, chunked)


def test_a_prefill_is_one_block_and_decode_blocks_are_stacked() -> None:
    settings = _settings()
    cache = _feed(GearCache(settings), _kv(500), [300] + [1] * 200)
    cache.flush()
    assert [(s.tokens, s.k.count, s.k.rank, s.prefill) for s in cache.segments] == [
        (256, 1, 4, True),
        (192, 3, 2, False),
    ]
    assert cache.buffered_tokens == 500 - 256 - 192


def test_compression_waits_for_the_next_call() -> None:
    cache = _feed(GearCache(_settings()), _kv(300), [256])
    assert cache.tokens_compressed == 0
    _feed(cache, _kv(300), [1])
    assert cache.tokens_compressed == 256


@pytest.mark.parametrize("draft", [1, 3, 5, 64, 100])
def test_what_one_call_brought_can_be_trimmed_without_a_trace(draft: int) -> None:
    settings, kv = _settings(), _kv(500)
    plain = _feed(GearCache(settings), kv, [150, 30])
    drafted = _feed(GearCache(settings), kv, [150, 30, draft])
    assert drafted.trim(draft) == draft
    for cache in (plain, drafted):
        _feed(cache, kv, [1] * 100)
    assert _equal(plain, drafted)


def test_blocks_equal_the_same_tokens_compressed_directly() -> None:
    settings, (keys, values) = _settings(), _kv(330)
    cache = _feed(GearCache(settings), (keys, values), [200] + [1] * 130)
    cache.flush()
    prefill, decode = cache.segments
    direct = compress(keys[:, :, :192], "k", settings.k, settings, 4)
    assert mx.array_equal(prefill.k.reconstruct(), direct.reconstruct())
    for i in range(decode.v.count):
        part = values[:, :, 192 + 64 * i : 256 + 64 * i]
        direct = compress(part, "v", settings.v, settings, 2)
        seen = decode.v.reconstruct()[:, :, 64 * i : 64 * (i + 1)]
        assert mx.array_equal(seen, direct.reconstruct())


@pytest.mark.parametrize("n", [0, 1, 40, 64, 100, 200, 350, 500])
def test_trim_keeps_the_rest_as_it_is(n: int) -> None:
    kv = _kv(700)
    cache = _feed(GearCache(_settings(n_sink=4)), kv, [300] + [1] * 200)
    before = cache.reconstruct()
    assert cache.trim(n) == n
    assert cache.offset == 500 - n
    if n < 500:
        after = cache.reconstruct()
        assert all(
            mx.array_equal(a, b[:, :, : 500 - n]) for a, b in zip(after, before, strict=True)
        )
    _feed(cache, kv, [150])
    assert cache.offset == 650 - n
    assert cache.trim(10_000) == 650 - n
    assert cache.empty()


def test_a_block_that_was_trimmed_takes_no_further_blocks() -> None:
    kv = _kv(400)
    cache = _feed(GearCache(_settings()), kv, [1] * 129)
    cache.trim(31)  # the buffer's token and 30 of the second block
    before = cache.reconstruct()
    _feed(cache, kv, [1] * 65)
    assert [(s.valid, s.k.count, s.grows) for s in cache.segments] == [
        (98, 2, False),
        (64, 1, True),
    ]
    for a, b in zip(cache.reconstruct(), before, strict=True):
        assert mx.array_equal(a[:, :, :98], b)


@pytest.mark.parametrize("preset", PRESETS)
def test_bytes_are_those_of_the_arrays(preset: str) -> None:
    cache = _feed(GearCache(_settings(**PRESETS[preset])), _kv(400), [300] + [1] * 100)
    cache.flush()
    size = cache.cache_bytes()
    arrays = sum(s.nbytes for s in cache.segments)
    assert size.accounted == arrays
    assert size.prefill + size.generated == arrays
    exact = cache.sinks.elements + cache.buffer.elements
    assert size.buffer == 2 * exact
    assert size.stored == arrays + 2 * exact
    assert size.held == cache.nbytes == arrays + 4 * exact  # this K and V are fp32
    assert size.fp16 == 2 * 2 * 400 * (64 + 48)
    assert sum(size.terms.values()) == size.stored


def test_nothing_dense_is_kept() -> None:
    cache = GearCache(_settings())
    keys, values = _kv(4096)
    cache.update_and_fetch(keys, values)
    cache.flush()
    del keys, values
    mx.clear_cache()
    before = mx.get_active_memory()
    size = cache.nbytes
    del cache
    mx.clear_cache()
    freed = before - mx.get_active_memory()
    assert size <= freed < 1.3 * size


@pytest.mark.fault
def test_the_buffer_stays_bounded_over_many_steps() -> None:
    cache = GearCache(_settings())
    keys, values = _kv(301)
    held = []
    for i in range(301):
        cache.update_and_fetch(keys[:, :, i : i + 1], values[:, :, i : i + 1])
        assert cache.buffered_tokens <= 64
        held.append(cache.cache_bytes().accounted)
    assert held == sorted(held)
    assert held[-1] > 0


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    kv = _kv(200, batch=3)
    together = _feed(GearCache(_settings()), kv, [128] + [1] * 72)
    together.flush()
    for row in range(3):
        alone = GearCache(_settings())
        keys, values = (a[row : row + 1] for a in kv)
        _feed(alone, (keys, values), [128] + [1] * 72)
        alone.flush()
        for a, b in zip(alone.reconstruct(), together.reconstruct(), strict=True):
            assert mx.allclose(a, b[row : row + 1], atol=1e-6)


def test_deepcopies_part_ways() -> None:
    kv = _kv(400)
    cache = _feed(GearCache(_settings()), kv, [200, 60])
    other = copy.deepcopy(cache)
    _feed(other, kv, [100])
    assert cache.offset == 260
    _feed(cache, kv, [100])
    assert _equal(cache, other)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_saved_cache_goes_on_bit_exactly(preset: str, dtype: mx.Dtype, tmp_path: Path) -> None:
    keys, values = _kv(400)
    kv = keys.astype(dtype), values.astype(dtype)
    cache = _feed(GearCache(_settings(**PRESETS[preset]), layer=3), kv, [150] + [1] * 100)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, [cache, GearCache(_settings())])
    loaded, empty = load_prompt_cache(file)
    assert empty.empty()
    assert loaded.settings == cache.settings
    assert loaded.layer == 3
    for c in (cache, loaded):
        _feed(c, kv, [150])
    assert _equal(cache, loaded)


def test_a_state_of_another_version_is_refused() -> None:
    state = GearCache(_settings()).state
    with pytest.raises(ValueError, match="version 99"):
        GearCache.from_state([99, *state[1:]])


def test_bad_input_is_refused_with_its_place() -> None:
    cache = GearCache(_settings(), layer=7)
    keys, values = _kv(100)
    with pytest.raises(ValueError, match=r"\[batch, kv_heads, tokens, head_dim\]"):
        cache.update_and_fetch(keys[0], values[0])
    with pytest.raises(ValueError, match="equal batch, heads and tokens"):
        cache.update_and_fetch(keys[:, :, :5], values)
    keys[0, 1, 3, 5] = float("nan")
    keys[0, 1, 4, 5] = float("inf")
    cache.update_and_fetch(keys, values)
    with pytest.raises(NonFiniteError, match=r"K of layer 7 holds 2 NaN or inf.*head 1") as caught:
        cache.flush()
    assert (caught.value.side, caught.value.layer, caught.value.head) == ("k", 7, 1)


@pytest.mark.fault
def test_kv_bits_is_refused_and_mlx_lm_cannot_mistake_the_cache() -> None:
    cache = GearCache(_settings())
    assert not hasattr(cache, "bits")
    assert not hasattr(type(cache).__mro__[1], "merge")
    with pytest.raises(ValueError, match="kv_bits"):
        hasattr(cache, "to_quantized")  # what mlx-lm asks at every call
