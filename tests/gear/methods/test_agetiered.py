"""agetiered: which bits a token has at which age, and what quantizing again costs."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import save_prompt_cache

from gear import GearConfig, load_prompt_cache
from gear.age_tiers import AgeTieredCache, BatchAgeTieredCache
from gear.attention import Packed, attend
from gear.checks import SettingError
from gear.methods.agetiered import AgeTiered
from gear.routing import Route
from tests.gear.base_cases import miss, normal
from tests.gear.oracle_cases import to_numpy

TIERS = AgeTiered().tiers()


def _cache(**options: int) -> AgeTieredCache:
    return AgeTiered(GearConfig(), **options).make_cache(0, 1)


def _min_max(x: np.ndarray, bits: int) -> np.ndarray:
    """Quantize in groups of 64 along the last axis, in fp64."""
    cells = x.reshape(*x.shape[:-1], -1, 64)
    low, high = cells.min(-1, keepdims=True), cells.max(-1, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    return (np.rint((cells - low) / scale) * scale + low).reshape(x.shape)


def _bits_of_tokens(cache: AgeTieredCache) -> list[int]:
    """Return the bits of every compressed token, in order."""
    return [s.k.settings.bits for s in cache.segments for _ in range(s.valid)]


def _expected(held: int, compressed: int) -> list[int]:
    """Return the bits of each block's tokens by the age of its youngest."""
    found = []
    for end in range(64, compressed + 1, 64):
        age = held - end
        found += [8 if age < 128 else 4 if age < 1024 else 2] * 64
    return found


def test_a_prompt_is_put_into_its_tiers_at_once() -> None:
    cache, x = _cache(), normal(1400)
    cache.update_and_fetch(x, x)
    cache.flush()
    assert _bits_of_tokens(cache) == _expected(1400, 1344)
    assert [(s.k.settings.bits, s.k.count) for s in cache.segments] == [(2, 5), (4, 14), (8, 2)]
    k, v = (to_numpy(side).astype(np.float64) for side in cache.reconstruct())
    start = 0
    for bits, blocks in ((2, 5), (4, 14), (8, 2)):
        part = np.array(x, np.float64)[:, :, start : start + 64 * blocks]
        by_channel = part.swapaxes(-1, -2)
        for found, rows in ((k.swapaxes(-1, -2), by_channel), (v, part)):
            span = (..., slice(start, start + 64 * blocks))
            seen = found[span] if rows is by_channel else found[:, :, span[1]]
            expected = _min_max(rows, bits)
            error, least = np.linalg.norm(seen - rows), np.linalg.norm(expected - rows)
            assert error == pytest.approx(least, rel=0.03)  # scale and zero are stored in fp16
            step = np.ptp(rows.reshape(*rows.shape[:-1], -1, 64), axis=-1).max() / (2**bits - 1)
            assert np.abs(seen - expected).max() < 1.1 * step
        start += 64 * blocks
    assert np.array_equal(k[:, :, 1344:], np.array(x)[:, :, 1344:])


def test_every_token_has_the_bits_of_its_age_at_every_step() -> None:
    cache, held = _cache(), 0
    for n in (100, 1, 30, 64, 700, 64, 64, 1, 200, 64, 64, 64):
        cache.update_and_fetch(normal(n, held), normal(n, held + 1))
        held += n
        cache.flush()
        assert _bits_of_tokens(cache) == _expected(held, cache.tokens_compressed)
        assert [s.k.settings.bits for s in cache.segments] == sorted(
            s.k.settings.bits for s in cache.segments
        )
        size = cache.cache_bytes()
        assert sum(size.terms.values()) == size.stored
        assert cache.offset == held


def test_quantizing_again_costs_nothing_where_grids_are_nested() -> None:
    """3 divides 15 divides 255, so each grid is part of the one before; 7 does not divide 15."""
    x = normal(640)
    costs = {}
    for bits in ((8, 4, 2), (8, 3, 2), (4, 3, 2)):
        tiers = tuple(zip((0, 128, 256), bits, strict=True))
        slow, fast = (AgeTieredCache(_cache().settings, 0, tiers) for _ in range(2))
        for i in range(0, 640, 64):
            slow.update_and_fetch(x[:, :, i : i + 64], x[:, :, i : i + 64])
        fast.update_and_fetch(x, x)
        for cache in (slow, fast):
            cache.flush()
        assert _bits_of_tokens(slow) == _bits_of_tokens(fast)
        errors = [
            [miss(a, b) for a, b in zip((x, x), cache.reconstruct(), strict=True)]
            for cache in (slow, fast)
        ]
        costs[bits] = np.array(errors[0]) / np.array(errors[1])
    assert costs[8, 4, 2] == pytest.approx([1, 1], abs=1e-3)
    assert (costs[4, 3, 2] > 1.005).all()


def test_trim_save_and_load_keep_bits_and_tiers(tmp_path: Path) -> None:
    cache = _cache(middle_age=64, old_age=192)
    x = normal(500)
    cache.update_and_fetch(x, x)
    cache.flush()
    before = cache.reconstruct()
    assert cache.trim(120) == 120
    other = copy.deepcopy(cache)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
    (loaded,) = load_prompt_cache(tmp_path / "cache.safetensors")
    assert loaded.tiers == cache.tiers == ((0, 8), (64, 4), (192, 2))
    for c in (cache, other, loaded):
        assert mx.array_equal(c.reconstruct()[0], before[0][:, :, :380])
        for i in range(5):
            c.update_and_fetch(normal(64, i), normal(64, 10 + i))
        c.flush()
        assert c.offset == 380 + 5 * 64
    for a, b, c in zip(*(c.reconstruct() for c in (cache, other, loaded)), strict=True):
        assert mx.array_equal(a, b)
        assert mx.array_equal(a, c)
    assert _bits_of_tokens(cache) == sorted(_bits_of_tokens(cache))


def test_attention_is_that_of_the_reconstruction() -> None:
    cache = _cache(middle_age=64, old_age=192)
    cache.update_and_fetch(normal(500, 1), normal(500, 2))
    cache.update_and_fetch(normal(3, 3), normal(3, 4))
    queries = normal(3, 5)
    keys, values = cache.reconstruct()
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1, mask="causal")
    found = attend(queries, cache, 0.1, "causal", tile=64)
    assert float(mx.abs(found - expected).max()) < 3e-5


@pytest.mark.parametrize("routed", [False, True])
def test_a_batch_row_is_what_it_is_alone(routed: bool) -> None:
    rows = [_cache(middle_age=64, old_age=128) for _ in range(2)]
    for i, row in enumerate(rows):
        row.update_and_fetch(normal(100 + 40 * i, i), normal(100 + 40 * i, 10 + i))
    alone = copy.deepcopy(rows)
    if routed:
        rows[0].route = Route(frozenset({0}), 64)
    batch = rows[0].merge(rows)
    assert isinstance(batch, BatchAgeTieredCache)
    for step in range(150):
        new = normal(1, 100 + step, rows=2), normal(1, 400 + step, rows=2)
        seen, _ = batch.update_and_fetch(*new)
        assert isinstance(seen, Packed) == routed
        query = normal(1, step, rows=2)
        out = seen.attend(query, 0.1, None, None) if routed else None
        for i, row in enumerate(alone):
            row.update_and_fetch(*(n[i : i + 1] for n in new))
            if out is not None:
                one = attend(query[i : i + 1], row, 0.1)
                assert float(mx.abs(out[i : i + 1] - one).max()) < 3e-5
    for i, one in enumerate(alone):
        row = batch.extract(i)
        assert _bits_of_tokens(row) == _bits_of_tokens(one)
        assert set(_bits_of_tokens(one)) == {8, 4, 2}
        for a, b in zip(row.reconstruct(), one.reconstruct(), strict=True):
            assert mx.array_equal(a, b)


def test_tiers_are_checked_and_recorded() -> None:
    [plan] = AgeTiered().plan(1)
    assert (plan["k"]["bits"], plan["tiers"]) == (8, [[0, 8], [128, 4], [1024, 2]])
    assert replace(AgeTiered(), bits=6).tiers()[0] == (0, 6)
    for options, text in (
        ({"old_bits": 5}, "old_bits"), ({"old_age": 100}, "old_age"), ({"bits": 9}, "bits=9"),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=text):
            AgeTiered(**options).plan(1)
    with pytest.raises(SettingError, match="n_b=48: must be a multiple of"):
        AgeTiered(GearConfig(n_b=48, group_size=16)).plan(1)
