"""PortCache: its counters, exact values, trimming, saving and batches."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import save_prompt_cache

from gear import KVCacheConfig, KVCacheFactory, NonFiniteError, PortCache, load_prompt_cache
from gear.codec import compress
from gear.port_cache import BatchPortCache

Pair = tuple[mx.array, mx.array]


def _config(**settings: Any) -> KVCacheConfig:
    return KVCacheConfig(method="gear", head_dim=64, **settings)


def _kv(tokens: int, seed: int = 0) -> Pair:
    """Return K and V [1, 2, tokens, 64 and 48], K with a level per channel."""
    level = mx.random.normal((64,), key=mx.random.key(99)) * 3
    k, v = (mx.random.normal((1, 2, tokens, 64), key=mx.random.key(10 * seed + i)) for i in (0, 1))
    return k + level, v[..., :48]


def _feed(cache: Any, kv: Pair, calls: list[int]) -> Any:
    start = cache.offset
    for n in calls:
        cache.update_and_fetch(*(x[:, :, start : start + n] for x in kv))
        start += n
    return cache


def _fed(calls: list[int], **settings: Any) -> PortCache:
    return _feed(KVCacheFactory.create(_config(**settings)), _kv(sum(calls)), calls)


def _counts(cache: PortCache) -> dict[str, float]:
    names = [f"{kind}_{side}_bytes" for kind in ("compressed", "base_only", "fp16")
             for side in ("key", "value")]  # fmt: skip
    return {n: getattr(cache, n) for n in [*names, "assigned_avg_bits", "error_recovery_ratio"]}


def _same(one: Any, other: PortCache) -> bool:
    both = zip(one.reconstruct(), other.reconstruct(), strict=True)
    return _counts(one) == _counts(other) and all(mx.array_equal(a, b).item() for a, b in both)


def test_counters_are_there_after_the_first_call() -> None:
    counts = _counts(_fed([200], gear_rank=4, gear_sparse_fraction=0.01))
    whole, waiting = 192, 8
    exact_k, exact_v = 2 * 2 * waiting * 64, 2 * 2 * waiting * 48
    base_k = 2 * (whole * 64 * 2 // 8 + 4 * (whole // 32) * 64) + exact_k
    base_v = 2 * (whole * 12 + 4 * 2 * whole) + exact_v
    assert counts["base_only_key_bytes"] == base_k
    assert counts["base_only_value_bytes"] == base_v
    more_k = 2 * (2 * 4 * (whole + 64) + int(whole * 64 * 0.01) * 4)
    more_v = 2 * (2 * 4 * (whole + 48) + int(whole * 48 * 0.01) * 4)
    assert counts["compressed_key_bytes"] == base_k + more_k
    assert counts["compressed_value_bytes"] == base_v + more_v
    assert counts["fp16_key_bytes"] == 2 * 2 * 200 * 64
    assert counts["fp16_value_bytes"] == 2 * 2 * 200 * 48
    assert counts["assigned_avg_bits"] == 16 * (base_k + more_k) / (2 * 2 * 200 * 64)


def test_the_counters_are_those_of_the_arrays() -> None:
    cache = _fed([200] + [1] * 100)
    size = cache.cache_bytes()
    assert size.stored == cache.compressed_key_bytes + cache.compressed_value_bytes
    assert size.fp16 == cache.fp16_key_bytes + cache.fp16_value_bytes
    assert size.accounted == sum(s.nbytes for s in cache.segments)


def test_an_empty_cache_counts_nothing() -> None:
    counts = _counts(KVCacheFactory.create(_config(gear_bits=3)))
    assert counts.pop("assigned_avg_bits") == 3
    assert not any(counts.values())


def test_single_tokens_wait_in_the_buffer() -> None:
    cache = _fed([1] * 60)
    assert cache.tokens_compressed == 0
    assert cache.compressed_key_bytes == cache.fp16_key_bytes
    assert cache.assigned_avg_bits == 16


def test_the_pass_of_a_prompt_sees_reconstructed_k_and_v() -> None:
    config, (keys, values) = _config(), _kv(200)
    seen_k, seen_v = KVCacheFactory.create(config).update_and_fetch(keys, values)
    s = config.settings()
    for seen, exact, side in ((seen_k, keys, "k"), (seen_v, values, "v")):
        block = compress(exact[:, :, :192], side, getattr(s, side), s, 4)
        assert mx.array_equal(seen[:, :, :192], block.reconstruct())
        assert mx.array_equal(seen[:, :, 192:], exact[:, :, 192:])


def test_the_recovered_share_is_that_of_the_squared_errors() -> None:
    keys, values = _kv(192)
    settings = {"gear_rank": 8, "gear_sparse_fraction": 0.02}
    base, full = (
        KVCacheFactory.create(_config(**s)) for s in ({"gear_rank": 0, "gear_sparse_fraction": 0.0},
                                                      settings)
    )  # fmt: skip
    errors = []
    for cache in (base, full):
        seen, _ = cache.update_and_fetch(keys, values)
        errors.append(((seen - keys) ** 2).sum().item())
    assert full.error_recovery_ratio == pytest.approx(1 - errors[1] / errors[0], rel=1e-4)
    assert 0.1 < full.error_recovery_ratio < 1
    assert base.error_recovery_ratio == 0


@pytest.mark.parametrize("scale", [1e-20, 1e15, 0.0])
def test_the_recovered_share_stays_in_range_at_any_scale(scale: float) -> None:
    cache = KVCacheFactory.create(_config())
    keys, values = _kv(128)
    cache.update_and_fetch(keys * scale, values)
    ratio = _fed([128]).error_recovery_ratio if scale else 0
    assert cache.error_recovery_ratio == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("n", [1, 30, 36, 60, 150, 336])
def test_trimming_recomputes_the_counters(n: int, exact: bool) -> None:
    cache = _fed([200] + [1] * 136, gear_quantize_values=not exact)
    cache.flush()
    before, values = _counts(cache), cache.reconstruct()[1]
    assert cache.trim(n) == n
    after = _counts(cache)
    assert after["fp16_key_bytes"] == 2 * 2 * (336 - n) * 64
    assert all(after[name] <= before[name] for name in before if name.endswith("bytes"))
    assert len(cache.errors) == sum(s.k.count for s in cache.segments)
    if n < 336:
        assert mx.array_equal(cache.reconstruct()[1], values[:, :, : 336 - n])
    else:
        assert after["error_recovery_ratio"] == 0
    _feed(cache, _kv(500), [100])
    assert cache.offset == 436 - n


def test_values_can_stay_exact() -> None:
    kv = _kv(330)
    cache = _feed(KVCacheFactory.create(_config(gear_quantize_values=False)), kv, [200] + [1] * 130)
    cache.flush()
    keys, values = cache.reconstruct()
    assert mx.array_equal(values, kv[1])
    assert not mx.allclose(keys, kv[0], atol=0.1)
    counts = _counts(cache)
    full = 2 * 2 * 330 * 48
    assert {counts[f"{c}_value_bytes"] for c in ("compressed", "base_only", "fp16")} == {full}
    assert counts["compressed_key_bytes"] < 0.5 * counts["fp16_key_bytes"]
    size = cache.cache_bytes()
    assert size.stored == counts["compressed_key_bytes"] + full
    assert size.accounted == sum(s.k.nbytes for s in cache.segments)
    assert sum(size.terms.values()) == size.stored
    assert size.tokens_compressed == 330 - cache.buffered_tokens
    assert size.held == cache.nbytes


def test_keys_beside_exact_values_are_those_beside_compressed_ones() -> None:
    both, keys_only = _fed([200, 70, 5]), _fed([200, 70, 5], gear_quantize_values=False)
    assert mx.array_equal(both.reconstruct()[0], keys_only.reconstruct()[0])
    assert both.error_recovery_ratio == keys_only.error_recovery_ratio


@pytest.mark.parametrize("exact", [False, True])
def test_nan_is_refused_on_either_side(exact: bool) -> None:
    for side in (0, 1):
        kv = _kv(128)
        kv[side][0, 1, 5, 3] = float("nan")
        cache = KVCacheFactory.create(_config(gear_quantize_values=not exact))
        with pytest.raises(NonFiniteError, match=r"holds 1 NaN or inf \(first in head 1\)"):
            cache.update_and_fetch(*kv)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("exact", [False, True])
def test_a_saved_cache_goes_on_bit_exactly(exact: bool, dtype: mx.Dtype, tmp_path: Path) -> None:
    keys, values = _kv(400)
    kv = keys.astype(dtype), values.astype(dtype)
    empty = KVCacheFactory.create(_config(gear_quantize_values=not exact))
    cache = _feed(copy.deepcopy(empty), kv, [200] + [1] * 70)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, [cache, empty])
    loaded, loaded_empty = load_prompt_cache(file)
    assert type(loaded) is PortCache
    assert _same(loaded, cache)
    for c in (cache, loaded, loaded_empty):
        _feed(c, kv, [100])
    assert _same(loaded, cache)
    assert loaded_empty.exact_values == exact
    with pytest.raises(ValueError, match="version 99"):
        PortCache.from_state([99, *cache.state[1:]])


@pytest.mark.parametrize("exact", [False, True])
def test_rows_of_a_batch_are_what_they_are_alone(exact: bool, tmp_path: Path) -> None:
    config, lengths = _config(gear_quantize_values=not exact), [150, 70, 1]
    rows = [_kv(n + 80, seed=i) for i, n in enumerate(lengths)]
    alone = [KVCacheFactory.create(config) for _ in rows]
    batch = PortCache.merge([KVCacheFactory.create(config) for _ in rows])
    longest = max(lengths)
    pads = [longest - n for n in lengths]
    batch.prepare(lengths=lengths, right_padding=pads)
    first = [
        [mx.pad(x[:, :, :n], [(0, 0), (0, 0), (0, p), (0, 0)], constant_values=1e4) for x in kv]
        for kv, n, p in zip(rows, lengths, pads, strict=True)
    ]
    batch.update_and_fetch(*(mx.concatenate(list(side)) for side in zip(*first, strict=True)))
    batch.finalize()
    for step in range(80):
        parts = [[x[:, :, n + step : n + step + 1] for x in kv]
                 for kv, n in zip(rows, lengths, strict=True)]  # fmt: skip
        batch.update_and_fetch(*(mx.concatenate(list(side)) for side in zip(*parts, strict=True)))
    for cache, kv, n in zip(alone, rows, lengths, strict=True):
        _feed(cache, kv, [n] + [1] * 80)
    file = str(tmp_path / "batch.safetensors")
    save_prompt_cache(file, [batch])
    (loaded,) = load_prompt_cache(file)
    assert type(batch) is type(loaded) is BatchPortCache
    for b in (batch, loaded):
        assert all(_same(b.extract(i), cache) for i, cache in enumerate(alone))
        b.flush()
        b.filter([2, 0])
        assert [r.offset for r in b.rows] == [81, 230]
    batch.extend(loaded)
    assert json.loads(batch.state[0]) == [[0, 0, 0, 0], None]


def test_the_first_call_refuses_a_head_too_small_for_the_rank() -> None:
    cache = KVCacheFactory.create(KVCacheConfig(head_dim=128, gear_rank=20))
    with pytest.raises(ValueError, match=r"^gear_rank=20: must be such that .*head_dim 8 costs"):
        cache.update_and_fetch(mx.zeros((1, 1, 4, 8)), mx.zeros((1, 1, 4, 8)))


def test_mlx_lm_cannot_mistake_the_cache() -> None:
    cache = KVCacheFactory.create(_config())
    assert not hasattr(cache, "bits")
    with pytest.raises(ValueError, match="kv_bits"):
        hasattr(cache, "to_quantized")
