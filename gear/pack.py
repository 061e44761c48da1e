"""Codes of b bits packed into uint32 words: a little-endian bit stream along the last axis.

32 codes fill b words, for every b in 1..8; for b = 1, 2, 3, 4, 5, 6, 8 this is bit for bit the
layout of `mx.quantize`, so `mx.quantized_matmul` reads it as it is.
"""

from __future__ import annotations

import mlx.core as mx

from gear.bytes import packed_words


def _pad_last(x: mx.array, multiple: int) -> mx.array:
    """Pad the last axis with zeros to a multiple of ``multiple``."""
    short = -x.shape[-1] % multiple
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)]) if short else x


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack codes [..., n] (unsigned, below 2**bits) into uint32 [..., ceil(n * bits / 32)]."""
    n, lead = codes.shape[-1], codes.shape[:-1]
    if 32 % bits == 0:  # no code lies in two words; the bits do not overlap, so a sum is an or
        grouped = _pad_last(codes, 32 // bits).reshape(*lead, -1, 32 // bits).astype(mx.uint32)
        return mx.left_shift(grouped, mx.arange(0, 32, bits, dtype=mx.uint32)).sum(axis=-1)
    grouped = _pad_last(codes, 32).reshape(*lead, -1, 32).astype(mx.uint32)
    words = []
    for j in range(bits):
        first, last = 32 * j // bits, (32 * (j + 1) - 1) // bits
        shifts = [i * bits - 32 * j for i in range(first, last + 1)]
        left = mx.array([max(s, 0) for s in shifts], dtype=mx.uint32)
        right = mx.array([max(-s, 0) for s in shifts], dtype=mx.uint32)
        part = mx.left_shift(mx.right_shift(grouped[..., first : last + 1], right), left)
        words.append(part.sum(axis=-1))
    packed = mx.stack(words, axis=-1).reshape(*lead, -1)
    return packed[..., : packed_words(n, bits)]


def unpack(words: mx.array, bits: int, n: int) -> mx.array:
    """Unpack uint32 [..., ceil(n*bits/32)] into uint8 codes [..., n]."""
    mask = mx.array(2**bits - 1, dtype=mx.uint32)
    if 32 % bits == 0:
        shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
        codes = mx.right_shift(words[..., None], shifts) & mask
    else:
        grouped = _pad_last(words, bits).reshape(*words.shape[:-1], -1, bits)
        starts = [i * bits for i in range(32)]
        low = mx.array([s // 32 for s in starts], dtype=mx.uint32)
        high = mx.array([min(s // 32 + 1, bits - 1) for s in starts], dtype=mx.uint32)
        right = mx.array([s % 32 for s in starts], dtype=mx.uint32)
        # a code that lies in one word has nothing in the next: 31 keeps the shift legal
        left = mx.array([32 - s % 32 if s % 32 + bits > 32 else 31 for s in starts], mx.uint32)
        spans = mx.array([s % 32 + bits > 32 for s in starts])
        codes = mx.right_shift(mx.take(grouped, low, axis=-1), right)
        upper = mx.left_shift(mx.take(grouped, high, axis=-1), left)
        codes = (codes | mx.where(spans, upper, 0)) & mask
    return codes.reshape(*words.shape[:-1], -1)[..., :n].astype(mx.uint8)


def cut_packed(words: mx.array, bits: int, start: int, stop: int) -> mx.array:
    """Return the words of codes ``start`` (a multiple of 32) to ``stop``."""
    return words[..., start * bits // 32 : -(-stop * bits // 32)]
