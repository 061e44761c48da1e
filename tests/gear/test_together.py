"""Rows that decode together attend to what they would alone, and hold nothing twice."""

from __future__ import annotations

import copy
from unittest.mock import patch

import mlx.core as mx
import pytest

from gear import GearCache, GearConfig, resolve
from gear.attention import attend
from gear.batch import BatchGearCache
from gear.config import LayerSettings
from gear.routing import Route

LENGTHS = [192, 150, 201, 40, 192]  # two of one kind, two with other blocks, one with none
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64
SCALE = HEAD_DIM**-0.5


def _settings(**kwargs: object) -> LayerSettings:
    return resolve(GearConfig(**kwargs), 1)[0]  # type: ignore[arg-type]


def _random(seed: int, heads: int, rows: int, tokens: int) -> mx.array:
    return mx.random.normal((rows, heads, tokens, HEAD_DIM), key=mx.random.key(seed))


def _row(settings: LayerSettings, seed: int, tokens: int) -> GearCache:
    cache = GearCache(settings)
    cache.update_and_fetch(*(_random(s, KV_HEADS, 1, tokens) for s in (seed, 100 + seed)))
    cache.flush()
    return cache


def _batch(settings: LayerSettings) -> tuple[BatchGearCache, list[GearCache]]:
    """Return a routed batch and copies of its rows, which go on alone."""
    rows = [_row(settings, i + 1, n) for i, n in enumerate(LENGTHS)]
    alone = [copy.deepcopy(row) for row in rows]
    batch = BatchGearCache(rows)
    for row in rows:
        row.route = Route(frozenset([0]), tile=64)
    return batch, alone


def _step(
    batch: BatchGearCache, alone: list[GearCache], number: int, sinks: mx.array | None = None
) -> float:
    """Decode one token of every row, together and alone; return how far the outputs are apart."""
    keys, values = (_random(1000 * s + number, KV_HEADS, len(alone), 1) for s in (1, 2))
    queries = _random(3000 + number, HEADS, len(alone), 1)
    k, _ = batch.update_and_fetch(keys, values)
    found = k.attend(queries, SCALE, None, sinks)
    assert k.shape[2] == batch.size()
    expected = []
    for i, row in enumerate(alone):
        row.update_and_fetch(keys[i : i + 1], values[i : i + 1])
        expected.append(attend(queries[i : i + 1], row, SCALE, sinks=sinks))
    return mx.abs(found - mx.concatenate(expected)).max().item()  # type: ignore[return-value]


def _held(cache: GearCache) -> list[mx.array]:
    blocks = [b for s in cache.segments for b in (s.k, s.v)]
    return [b.arrays[n] for b in blocks for n in sorted(b.arrays)]


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sink-logits"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"n_sink": 4, "recent": 7}, {"sparse_frac": 0.0}, {"base": "vector"}, {"bits": 3}],
)
def test_every_step_equals_rows_alone(kwargs: dict[str, object], sinks: bool) -> None:
    batch, alone = _batch(_settings(**kwargs))
    logits = mx.arange(HEADS) * 0.3 if sinks else None
    with patch("gear.batch._handle", side_effect=AssertionError("went row by row")):
        assert max(_step(batch, alone, n, logits) for n in range(150)) < 1e-5
    batch.flush()
    for i, row in enumerate(alone):
        row.flush()
        found = batch.extract(i)
        assert found.offset == row.offset
        for a, b in zip(_held(found), _held(row), strict=True):
            assert a.dtype == b.dtype
            assert mx.array_equal(a, b).item()


def test_rows_leave_join_and_are_trimmed_between_steps() -> None:
    settings = _settings()
    batch, alone = _batch(settings)
    assert max(_step(batch, alone, n) for n in range(70)) < 1e-5
    batch.filter([3, 0, 2])
    alone = [alone[i] for i in (3, 0, 2)]
    assert max(_step(batch, alone, n) for n in range(70, 75)) < 1e-5
    batch.trim(9)
    for row in alone:
        row.trim(9)
    assert max(_step(batch, alone, n) for n in range(80, 90)) < 1e-5
    more = _row(settings, 9, 192)
    alone.append(copy.deepcopy(more))
    batch.extend(BatchGearCache([more]))
    assert max(_step(batch, alone, n) for n in range(90, 160)) < 1e-5
    state = batch.state
    batch.state = state
    batch.rows[0].route = Route(frozenset([0]), tile=64)
    assert max(_step(batch, alone, n) for n in range(160, 230)) < 1e-5


def test_a_call_of_several_tokens_parts_the_rows() -> None:
    batch, alone = _batch(_settings())
    _step(batch, alone, 0)
    keys, values = (_random(s, KV_HEADS, len(alone), 3) for s in (7, 8))
    batch.update_and_fetch(keys, values)
    for i, row in enumerate(alone):
        row.update_and_fetch(keys[i : i + 1], values[i : i + 1])
    assert [r.offset for r in batch.rows] == [r.offset for r in alone]
    assert _step(batch, alone, 1) < 1e-5


def test_like_segments_are_held_once() -> None:
    """The rows' arrays are views of a stack: what the process holds does not grow by it."""
    settings = _settings()
    rows = [_row(settings, i + 1, 2048) for i in range(4)]
    mx.eval([a for row in rows for a in _held(row)])
    batch = BatchGearCache(rows)
    for row in rows:
        row.route = Route(frozenset([0]), tile=64)
    mx.clear_cache()
    before = mx.get_active_memory()
    keys = _random(5, KV_HEADS, 4, 1)
    k, _ = batch.update_and_fetch(keys, keys)
    mx.eval(k.attend(_random(6, HEADS, 4, 1), SCALE, None, None))
    mx.clear_cache()
    grown = mx.get_active_memory() - before
    columns = sum(row.buffer.nbytes for row in batch.rows)
    blocks = sum(a.nbytes for row in batch.rows for a in _held(row))
    assert grown < columns + 0.1 * blocks


def test_a_window_counts_the_columns_it_stands_for() -> None:
    batch, alone = _batch(_settings())
    _step(batch, alone, 0)
    shared = sum(row.buffer.nbytes for row in batch.rows)
    assert shared >= sum(row.buffer.nbytes for row in alone)
    stored = [row.cache_bytes().stored for row in batch.rows]
    assert stored == [row.cache_bytes().stored for row in alone]
