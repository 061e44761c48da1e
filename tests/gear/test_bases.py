"""What GEAR does with any base: layout, bytes, correction, reading, time, attention, saving."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import save_prompt_cache

from gear import GearCache, decode_kernel, load_prompt_cache
from gear import packed as packed_products
from gear.attention import attend
from gear.bases import BASES, load_base
from gear.batch import BatchGearCache
from gear.bytes import TERMS, block_terms
from gear.codec import compress
from gear.tiles import tiles
from tests.gear.base_cases import TRIAL, miss, normal, settings
from tests.gear.oracle_cases import to_numpy

ALL = [*BASES, "trial"]
EACH = pytest.mark.parametrize("base", ALL)
SIDES = pytest.mark.parametrize("side", ["k", "v"])


@pytest.fixture(autouse=True)
def _trial_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BASES, "trial", TRIAL)


@EACH
@SIDES
def test_a_base_declares_what_it_stores(base: str, side: str) -> None:
    own, s = load_base(base), settings(base, sparse_frac=0.0)
    assert own.name == base
    layout = own.layout(side)
    assert {held.term for held in layout.values()} <= {"codes", "scales"}
    assert {held.joined for held in layout.values()} <= {2, 3, None}
    alone = compress(normal(128, rows=2), side, s.k, s, 0)
    assert alone.arrays.keys() <= layout.keys()
    assert all(a.shape[0] == 2 for a in alone.arrays.values())


@EACH
@SIDES
def test_bytes_held_are_the_closed_form_term_by_term(base: str, side: str) -> None:
    s = settings(base, sparse_frac=0.05)
    for tokens in (64, 128, 192):
        block = compress(normal(tokens, rows=2), side, s.k, s, 3)
        picked = block.quantizer.picked(block.arrays)
        expected = block_terms(side, s.k, s.outlier_stage, 2, tokens, 64, 3, picked)
        assert list(expected) == list(TERMS)
        assert block.terms() == {term: 2 * size for term, size in expected.items()}


@EACH
@SIDES
def test_low_rank_and_outliers_correct_every_base(base: str, side: str) -> None:
    x, errors = normal(256), []
    for rank, frac in ((0, 0.0), (4, 0.0), (16, 0.0), (16, 0.1), (64, 1.0)):
        s = settings(base, sparse_frac=frac, outlier_stage="post_lowrank")
        errors.append(miss(x, compress(x, side, s.k, s, rank).reconstruct()))
    assert all(b < 0.99 * a for a, b in pairwise(errors))
    assert errors[-1] < 1e-3


@EACH
@SIDES
def test_outliers_shape_nothing_but_themselves(base: str, side: str) -> None:
    """Three vectors' largest entries a thousand times larger: all the rest stays bit for bit."""
    s, x = settings(base, sparse_frac=0.05), normal(64)
    rows = np.array(x).swapaxes(-1, -2).copy() if side == "k" else np.array(x)
    top = rows[0, 1, :3].argmax(axis=-1)
    rows[0, 1, range(3), top] *= 1000
    far = mx.array(rows.swapaxes(-1, -2).copy() if side == "k" else rows)
    one, other = (to_numpy(compress(v, side, s.k, s, 0).reconstruct())[0, 1] for v in (x, far))
    one, other = (v.T if side == "k" else v for v in (one, other))
    same = np.ones(one.shape, bool)
    same[range(3), top] = False
    assert np.array_equal(one[same], other[same])
    assert other[range(3), top] == pytest.approx(rows[0, 1, range(3), top], rel=1e-3)


@pytest.mark.parametrize(
    ("base", "scale_bits"),
    [*((base, 16) for base in ALL), ("grouped", 8), ("vector", 8), ("per_token", 8)],
)
def test_blocks_join_split_and_are_read_in_tiles(base: str, scale_bits: int) -> None:
    s = settings(base, scale_bits=scale_bits, sparse_frac=0.05)
    cache = GearCache(s)
    cache.update_and_fetch(normal(320, 1), normal(320, 2))
    for i in range(3):
        cache.update_and_fetch(normal(64, 3 + i), normal(64, 9 + i))
    cache.flush()
    assert [seg.k.count for seg in cache.segments] == [1, 3]
    for segment in cache.segments:
        whole = segment.reconstruct(mx.float32)
        for tile in (32, 96, 128):
            parts = list(tiles(segment, tile))
            assert len(parts) > 1 or segment.k.cut_unit is None
            for side in (0, 1):
                found = [(k, v)[side].reconstruct()[:, :, :meant] for k, v, meant in parts]
                assert mx.array_equal(mx.concatenate(found, axis=2), whole[side])
    joined = cache.segments[1].k
    direct = [compress(normal(64, 3 + i), "k", s.k, s, s.k.rank_decode) for i in range(3)]
    for i, block in enumerate(direct):
        assert mx.array_equal(joined.some(i, i + 1).reconstruct(), block.reconstruct())
        assert block.matches(joined)


@EACH
def test_attention_is_that_of_the_reconstruction(base: str) -> None:
    """Codes go to packed products only where they lie as those read them."""
    cache = GearCache(settings(base, sparse_frac=0.05, n_sink=2))
    cache.update_and_fetch(normal(300, 1), normal(300, 2))
    cache.update_and_fetch(normal(3, 3), normal(3, 4))
    segment = cache.segments[0]
    assert segment.k.packed == segment.v.packed == (base in ("grouped", "vector", "affine_mlx"))
    assert segment.k.packed or not packed_products.fits(segment)
    assert segment.k.packed or not decode_kernel.usable(normal(1, 6), segment.k, segment.v)
    queries = normal(3, 5)
    keys, values = cache.reconstruct()
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1, mask="causal")
    for tile in (64, 1024):
        found = attend(queries, cache, 0.1, "causal", tile=tile)
        assert float(mx.abs(found - expected).max()) < 1e-5


@EACH
def test_a_batch_row_is_what_it_is_alone(base: str) -> None:
    s = settings(base, sparse_frac=0.05)
    rows = [GearCache(s) for _ in range(3)]
    for i, row in enumerate(rows):
        row.update_and_fetch(normal(90, i), normal(90, 10 + i))
    alone = copy.deepcopy(rows)
    batch = BatchGearCache(rows)
    for step in range(40):
        new = normal(1, 100 + step, rows=3), normal(1, 200 + step, rows=3)
        batch.update_and_fetch(*new)
        for i, row in enumerate(alone):
            row.update_and_fetch(*(n[i : i + 1] for n in new))
    for row, one in zip(batch.rows, alone, strict=True):
        assert len(one.segments) == 2
        for a, b in zip(row.reconstruct(), one.reconstruct(), strict=True):
            assert mx.array_equal(a, b)


@EACH
def test_trim_save_and_load(base: str, tmp_path: Path) -> None:
    cache = GearCache(settings(base, sparse_frac=0.05))
    cache.update_and_fetch(normal(300, 1), normal(300, 2))
    cache.flush()
    cache.trim(100)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
    (loaded,) = load_prompt_cache(tmp_path / "cache.safetensors")
    assert loaded.settings == cache.settings
    for a, b in zip(loaded.reconstruct(), cache.reconstruct(), strict=True):
        assert a.shape[2] == 200
        assert mx.array_equal(a, b)


def test_a_block_with_settings_of_its_own_is_saved_with_them(tmp_path: Path) -> None:
    s, other = settings("grouped"), settings("per_token", bits=4)
    cache, x = GearCache(s), normal(64, 1)
    cache.update_and_fetch(x, x)
    cache.flush()
    cache.add_blocks((compress(x, "k", other.k, other, 2), compress(x, "v", s.v, s, 2)),
                     prefill=False)  # fmt: skip
    assert len(cache.segments) == 2
    save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
    (loaded,) = load_prompt_cache(tmp_path / "cache.safetensors")
    assert [seg.k.settings.base for seg in loaded.segments] == ["grouped", "per_token"]
    for a, b in zip(loaded.reconstruct(), cache.reconstruct(), strict=True):
        assert mx.array_equal(a, b)
