"""BatchGearCache: a row holds the blocks it would have alone, whatever pads and neighbours do."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import save_prompt_cache

from gear import GearCache, GearConfig, load_prompt_cache, resolve
from gear.batch import BatchGearCache
from gear.config import LayerSettings
from gear.routing import Route

LENGTHS = [150, 70, 0, 300]


def _settings(**kwargs: object) -> LayerSettings:
    return resolve(GearConfig(**kwargs), 1)[0]  # type: ignore[arg-type]


def _rows(lengths: list[int], dtype: mx.Dtype = mx.float32) -> list[tuple[mx.array, mx.array]]:
    """Return K and V [1, 2, n, 64] for each row, of different sizes by row."""
    out = []
    for i, n in enumerate(lengths):
        k, v = (mx.random.normal((1, 2, n, 64), key=mx.random.key(10 * i + s)) for s in (0, 1))
        out.append((k.astype(dtype), v.astype(dtype)))
    return out


def _padded(parts: list[mx.array], *, left: bool) -> mx.array:
    """Stack rows of different lengths with garbage pads."""
    longest = max(p.shape[2] for p in parts)
    out = []
    for p in parts:
        short = longest - p.shape[2]
        width = [(0, 0), (0, 0), (short, 0) if left else (0, short), (0, 0)]
        out.append(mx.pad(p, width, constant_values=1e4))
    return mx.concatenate(out)


def _same(one: GearCache, other: GearCache) -> bool:
    if one.offset != other.offset or len(one.segments) != len(other.segments):
        return False
    if one.empty():
        return True
    blocks = zip(one.segments, other.segments, strict=True)
    for a, b in blocks:
        for x, y in ((a.k, b.k), (a.v, b.v)):
            if {n: v.dtype for n, v in x.arrays.items()} != {
                n: v.dtype for n, v in y.arrays.items()
            }:
                return False
    dense = zip(one.reconstruct(), other.reconstruct(), strict=True)
    codes = zip(one.segments, other.segments, strict=True)
    same_codes = all(mx.array_equal(a.k.codes(), b.k.codes()).item() for a, b in codes)
    return same_codes and all(mx.allclose(x, y, atol=1e-5).item() for x, y in dense)


def _alone(settings: LayerSettings, row: tuple[mx.array, mx.array], calls: list[int]) -> GearCache:
    cache, start = GearCache(settings), 0
    for n in calls:
        if n:
            cache.update_and_fetch(*(a[:, :, start : start + n] for a in row))
        start += n
    cache.flush()
    return cache


@pytest.mark.parametrize("chunk", [1000, 64, 37])
@pytest.mark.parametrize("extra", [{}, {"n_sink": 4, "recent": 7}, {"attend": "compressed"}])
def test_right_padded_prompts_in_chunks(chunk: int, extra: dict[str, object]) -> None:
    settings, rows = _settings(**extra), _rows(LENGTHS)
    batch = GearCache.merge([GearCache(settings) for _ in rows])
    batch.prepare(lengths=LENGTHS, right_padding=[max(LENGTHS) - n for n in LENGTHS])
    keys, values = (_padded([r[s] for r in rows], left=False) for s in (0, 1))
    for start in range(0, max(LENGTHS), chunk):
        part = slice(start, start + chunk)
        batch.update_and_fetch(keys[:, :, part], values[:, :, part])
    batch.finalize()
    batch.flush()
    assert batch.offset.tolist() == LENGTHS
    for i, (row, n) in enumerate(zip(rows, LENGTHS, strict=True)):
        calls = [min(chunk, n - start) for start in range(0, n, chunk)]
        assert _same(batch.extract(i), _alone(settings, row, calls))


def test_left_padded_prompts() -> None:
    settings, rows = _settings(), _rows(LENGTHS)
    batch = BatchGearCache([GearCache(settings) for _ in rows])
    batch.prepare(left_padding=[max(LENGTHS) - n for n in LENGTHS])
    assert batch.offset.tolist() == [n - max(LENGTHS) for n in LENGTHS]
    keys, values = (_padded([r[s] for r in rows], left=True) for s in (0, 1))
    batch.update_and_fetch(keys, values)
    batch.flush()
    for i, (row, n) in enumerate(zip(rows, LENGTHS, strict=True)):
        assert _same(batch.extract(i), _alone(settings, row, [n]))


@pytest.mark.fault
def test_decoding_after_merge_equals_each_row_alone() -> None:
    settings, rows = _settings(), _rows([n + 200 for n in LENGTHS])
    prompts = [_alone(settings, row, [n]) for row, n in zip(rows, LENGTHS, strict=True)]
    batch = GearCache.merge(prompts)
    for step in range(200):
        keys, values = (
            mx.concatenate(
                [r[s][:, :, n + step : n + step + 1] for r, n in zip(rows, LENGTHS, strict=True)]
            )
            for s in (0, 1)
        )
        seen, _ = batch.update_and_fetch(keys, values)
        assert seen.shape == (4, 2, max(LENGTHS) + step + 1, 64)
    batch.flush()
    for i, (row, n) in enumerate(zip(rows, LENGTHS, strict=True)):
        assert _same(batch.extract(i), _alone(settings, row, [n] + [1] * 200))


def test_what_attention_sees_is_masked_to_the_rows_own_tokens() -> None:
    settings, rows = _settings(), _rows(LENGTHS)
    batch = GearCache.merge([_alone(settings, r, [n]) for r, n in zip(rows, LENGTHS, strict=True)])
    mask = batch.make_mask(2)
    new = mx.random.normal((4, 2, 2, 64))
    seen, _ = batch.update_and_fetch(new, new)
    assert mask.shape == (4, 1, 2, 302)
    assert mask[:, 0, 1].sum(axis=-1).tolist() == [n + 2 for n in LENGTHS]
    for i, n in enumerate(LENGTHS):
        shown = seen[i][:, 302 - n - 2 :]
        assert mx.allclose(shown, batch.extract(i).reconstruct()[0][0], atol=1e-6)


def test_a_wide_row_does_not_widen_its_neighbours() -> None:
    settings, rows = _settings(), _rows([200, 200])
    huge = rows[1][0] * 1e6
    rows[1] = (huge, rows[1][1])
    batch = GearCache.merge([GearCache(settings), GearCache(settings)])
    for step in range(200):
        keys, values = (mx.concatenate([r[s][:, :, step : step + 1] for r in rows]) for s in (0, 1))
        batch.update_and_fetch(keys, values)
    batch.flush()
    for i, row in enumerate(rows):
        alone = _alone(settings, row, [1] * 200)
        assert _same(batch.extract(i), alone)
    assert batch.rows[0].segments[0].k.arrays["scale"].dtype == mx.float16
    assert batch.rows[1].segments[0].k.arrays["scale"].dtype == mx.float32


def test_filter_extend_trim_and_save(tmp_path) -> None:  # type: ignore[no-untyped-def]
    settings, rows = _settings(), _rows(LENGTHS)
    caches = [_alone(settings, r, [n]) for r, n in zip(rows, LENGTHS, strict=True)]
    batch = GearCache.merge(caches[:2])
    batch.extend(GearCache.merge(caches[2:]))
    assert batch.offset.tolist() == LENGTHS
    batch.filter(mx.array([3, 1]))
    assert batch.offset.tolist() == [300, 70]
    batch.trim(30)
    assert batch.offset.tolist() == [270, 40]
    file = str(tmp_path / "batch.safetensors")
    save_prompt_cache(file, [batch])
    (loaded,) = load_prompt_cache(file)
    for i in range(2):
        assert _same(loaded.extract(i), batch.extract(i))


def test_misuse_is_refused() -> None:
    one, other = GearCache(_settings()), GearCache(_settings(bits=4))
    with pytest.raises(ValueError, match="same settings"):
        GearCache.merge([one, other])
    with pytest.raises(ValueError, match="at least one row"):
        BatchGearCache([])
    batch = GearCache.merge([one, GearCache(_settings())])
    with pytest.raises(ValueError, match="lengths"):
        batch.prepare(right_padding=[0, 1])
    with pytest.raises(ValueError, match="kv_bits"):
        hasattr(batch, "to_quantized")
    batch.prepare(lengths=[2, 1], right_padding=[0, 1])
    with pytest.raises(ValueError, match="finalize"):
        batch.extend(GearCache.merge([GearCache(_settings())]))
    batch.finalize()
    batch.update_and_fetch(mx.ones((2, 1, 3, 64)), mx.ones((2, 1, 3, 64)))
    with pytest.raises(ValueError, match="empty cache"):
        batch.prepare(left_padding=[1, 0])


@pytest.mark.parametrize("routed", [0, 1])
def test_rows_off_the_route_take_the_others(routed: int) -> None:
    """A row that was loaded from a file knows no route; beside one that does it attends packed."""
    rows = [GearCache(_settings()) for _ in range(2)]
    for row, (k, v) in zip(rows, _rows([150, 70]), strict=True):
        row.update_and_fetch(k, v)
        row.flush()
    rows[routed].route = route = Route(frozenset([0]), tile=64)
    batch, new, queries = BatchGearCache(rows), *_rows([5, 5])[0]
    queries = mx.concatenate([queries, queries])
    keys, values = batch.update_and_fetch(*(mx.concatenate([new, new]) for _ in "kv"))
    assert keys.shape == values.shape == (2, 2, 155, 64)
    found = keys.attend(queries, 0.1, batch.make_mask(5), None)
    route.open = False
    for i, row in enumerate(rows):
        k, v = row.keys_and_values()
        expected = mx.fast.scaled_dot_product_attention(
            queries[i : i + 1], k, v, scale=0.1, mask="causal"
        )
        assert mx.allclose(found[i : i + 1], expected, atol=1e-4)
