"""Packing is a lossless little-endian bit stream, and mx.quantize's layout where MLX has one."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from gear.pack import pack, packed_words, unpack


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", [1, 5, 31, 32, 33, 64, 100, 257])
def test_round_trip_and_size(bits: int, n: int) -> None:
    codes = np.random.default_rng(bits * 1000 + n).integers(0, 2**bits, (2, 3, n), dtype=np.uint8)
    words = pack(mx.array(codes), bits)
    assert words.dtype == mx.uint32
    assert words.shape == (2, 3, -(-n * bits // 32)) == (2, 3, packed_words(n, bits))
    assert np.array_equal(np.array(unpack(words, bits, n)), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_stream_is_little_endian(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, 96, dtype=np.uint8)
    stream = 0
    for i, code in enumerate(codes.tolist()):
        stream |= code << (i * bits)
    expected = np.frombuffer(stream.to_bytes(96 * bits // 8, "little"), dtype="<u4")
    assert np.array_equal(np.array(pack(mx.array(codes), bits)), expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_layout_is_that_of_mx_quantize(bits: int) -> None:
    x = mx.random.normal((4, 128), key=mx.random.key(bits))
    words, scale, bias = mx.quantize(x, group_size=64, bits=bits)
    codes = unpack(words, bits, 128).astype(mx.float32).reshape(4, 2, 64)
    ours = (codes * scale[..., None] + bias[..., None]).reshape(4, 128)
    theirs = mx.dequantize(words, scale, bias, group_size=64, bits=bits)
    assert mx.allclose(ours, theirs, atol=1e-6)
    assert mx.array_equal(pack(codes.reshape(4, 128), bits), words)
