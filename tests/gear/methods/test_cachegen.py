"""cachegen: anchors and differences against fp64 by hand, bits by thirds, the bitstream."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from gear import GearCache, GearConfig
from gear.checks import SettingError
from gear.codec import compress
from gear.config import LayerConfig, SideConfig
from gear.entropy import bitstream, codes_by_channel, decode, encode
from gear.methods.cachegen import CacheGen
from tests.gear.base_cases import miss
from tests.gear.oracle_cases import to_numpy

pytest.importorskip("constriction")


def _near(tokens: int, seed: int = 0) -> np.ndarray:
    """Return [1, 2, tokens, 64] whose neighbours are alike, as keys and values are."""
    rng = np.random.default_rng(seed)
    level = rng.normal(size=(1, 2, 1, 64)) * 4
    drift = np.cumsum(rng.normal(size=(1, 2, tokens, 64)), axis=2) * 0.1
    return level + drift + 0.1 * rng.normal(size=drift.shape)


def _min_max(x: np.ndarray, bits: int) -> np.ndarray:
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    return np.rint((x - low) / scale) * scale + low


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_cachegen_is_what_one_computes_by_hand(side: str, layer: int) -> None:
    x = _near(120)
    s = CacheGen().layers(3)[layer]
    found = to_numpy(compress(mx.array(x.astype(np.float32)), side, s.k, s, 0).reconstruct())
    groups, found = (a.reshape(1, 2, 12, 10, 64) for a in (x, found))
    anchor, seen = groups[:, :, :, :1], found[:, :, :, :1].astype(np.float64)
    off = np.abs(seen - _min_max(anchor, 8)) / np.ptp(anchor, axis=-1, keepdims=True) * 255
    assert off.max() < 1.2  # a tie: scale and zero are stored in fp16
    assert (off < 0.1).mean() > 0.8
    rest = seen + _min_max(groups[:, :, :, 1:] - seen, (4, 3, 2)[layer])
    assert (np.abs(found[:, :, :, 1:] - rest) < 2e-3).mean() > 0.99
    assert np.linalg.norm(found[:, :, :, 1:] - groups[:, :, :, 1:]) == pytest.approx(
        np.linalg.norm(rest - groups[:, :, :, 1:]), rel=1e-3
    )


def test_bits_follow_the_thirds_of_the_layers_whatever_gear_says() -> None:
    gear = GearConfig(bits=8, k=SideConfig(bits=5), by_layer={1: LayerConfig(v=SideConfig(bits=7))})
    for n_layers, expected in ((1, [4]), (6, [4, 4, 3, 3, 2, 2]), (4, [4, 4, 3, 2])):
        if n_layers > 1:
            plan = CacheGen(gear).plan(n_layers)
            assert [layer["k"]["bits"] for layer in plan] == expected
            assert [layer["v"]["bits"] for layer in plan] == expected
    assert [layer["k"]["bits"] for layer in CacheGen().plan(1)] == [4]
    assert CacheGen().block_tokens() == 60
    with pytest.raises(SettingError, match="n_b=64: must be a multiple of 10"):
        CacheGen(GearConfig(n_b=64)).plan(2)


def test_differences_to_anchors_pay_where_tokens_are_alike() -> None:
    x = mx.array(_near(120).astype(np.float32))
    s = CacheGen(tokens=10).layers(3)[2]
    alone = np.array(x).reshape(1, 2, 120, 64)
    found = miss(x, compress(x, "k", s.k, s, 0).reconstruct())
    assert found < 0.3 * miss(x, mx.array(_min_max(alone, 2).astype(np.float32)))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_what_is_coded_comes_back_exactly_near_the_entropy(bits: int) -> None:
    rng = np.random.default_rng(bits)
    spread = rng.uniform(0.02, 0.3, size=(32, 1)) * 2**bits
    codes = np.clip(np.rint(rng.normal(2**bits / 2, spread, (32, 2000))), 0, 2**bits - 1)
    codes = codes.astype(np.uint8)
    codes[3] = 2**bits - 1  # a channel of one symbol
    coded = encode(codes, bits)
    assert np.array_equal(decode(coded), codes)
    least = 0.0
    for row in codes:
        share = np.bincount(row) / row.size
        least -= row.size * (share[share > 0] * np.log2(share[share > 0])).sum()
    assert least / 8 - 8 <= coded.words.nbytes < 1.02 * least / 8 + 64
    assert coded.tables.nbytes == 32 * 2**bits
    assert decode(encode(codes[:, :0], bits)).shape == (32, 0)


def test_the_bitstream_of_a_cache_comes_back_and_is_no_resident_size() -> None:
    s = CacheGen().layers(3)[2]
    cache = GearCache(s)
    for i, tokens in enumerate((900, 60, 60, 7)):
        cache.update_and_fetch(*(mx.array(_near(tokens, 2 * i + j).astype(np.float32))
                                 for j in (0, 1)))  # fmt: skip
    cache.flush()
    before, size = cache.cache_bytes(), bitstream(cache)
    assert cache.cache_bytes() == before
    packed = 0
    for side in ("k", "v"):
        blocks = [getattr(segment, side) for segment in cache.segments]
        codes = codes_by_channel(blocks)
        assert codes.shape == (2 * 64, 1020 // 10 * 9)
        assert np.array_equal(decode(encode(codes, 2)), codes)
        packed += sum(b.arrays["codes"].nbytes for b in blocks)
    assert 0.5 * packed < size.payload < 0.95 * packed
    assert size.raw == before.stored - packed
    assert size.nbytes == size.payload + size.tables + size.raw < before.stored


def test_other_codes_are_refused() -> None:
    from gear.methods.kivi import Kivi

    cache = GearCache(Kivi().layers(1)[0])
    assert bitstream(cache).nbytes == 0
    x = mx.array(_near(64).astype(np.float32))
    cache.update_and_fetch(x, x)
    cache.flush()
    with pytest.raises(ValueError, match="base=grouped with 2 bits: only the codes of"):
        bitstream(cache)
