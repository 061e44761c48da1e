"""Arithmetic coding of the codes that a cache holds: CacheGen's bitstream (arXiv:2310.07240, §5.2).

    bits ~ sum over channels of n · H(codes of the channel),  one distribution per head and channel

A layer's cache gives one bitstream: the codes of each side, head and channel over all of its
compressed tokens, by the range coder of the library `constriction` (``pip install
gear-mlx[entropy]``). Decoding gives the codes back exactly. What a receiver needs is counted:

    payload   the coded words          tables    a byte a symbol and channel: the distributions
    raw       everything else held: anchors, scales, zeros, other terms, exact tokens at 2 bytes

This is the size of a *stored or sent* cache. It is no resident size: a cache that attends holds the
packed codes, whose bytes `GearCache.cache_bytes` counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from gear.pack import unpack

if TYPE_CHECKING:
    from gear.block import Block
    from gear.cache import GearCache


@dataclass(frozen=True)
class Coded:
    """Codes [channels, n] of ``bits`` each as one run of words, and what decodes them."""

    words: np.ndarray
    """uint32"""
    tables: np.ndarray
    """uint8 [channels, 2^bits]: each symbol's count, the largest of a channel being 255."""
    n: int

    @property
    def nbytes(self) -> int:
        """Bytes of words and tables."""
        return self.words.nbytes + self.tables.nbytes


def _coder() -> Any:
    """Return constriction's range coding, or say how to get it."""
    try:
        return import_module("constriction").stream
    except ImportError as error:
        hint = "constriction is not installed: pip install 'gear-mlx[entropy]'."
        raise ImportError(hint) from error


def _model(stream: Any, table: np.ndarray) -> Any:
    """Return the distribution of one channel; the coder itself leaves no symbol at zero."""
    weights = table.astype(np.float64)
    return stream.model.Categorical(weights / weights.sum(), perfect=False)


def encode(codes: np.ndarray, bits: int) -> Coded:
    """Return codes [channels, n] (below 2^bits) coded, each channel by its own distribution."""
    stream = _coder()
    coder = stream.queue.RangeEncoder()
    counts = np.stack([(codes == symbol).sum(axis=1) for symbol in range(2**bits)], axis=1)
    most = counts.max(axis=1, keepdims=True)
    tables = np.ceil(counts * 255 / np.maximum(most, 1)).astype(np.uint8)
    for row, table in zip(codes.astype(np.int32), tables, strict=True):
        if row.size:
            coder.encode(row, _model(stream, table))
    return Coded(coder.get_compressed(), tables, codes.shape[1])


def decode(coded: Coded) -> np.ndarray:
    """Return the codes, uint8 [channels, n]."""
    stream = _coder()
    coder = stream.queue.RangeDecoder(coded.words)
    rows = [
        coder.decode(_model(stream, table), coded.n) if coded.n else np.zeros(0, np.int32)
        for table in coded.tables
    ]
    return np.stack(rows).astype(np.uint8)


def codes_by_channel(blocks: list[Block]) -> np.ndarray:
    """Return the codes of the blocks of one side, uint8 [batch · heads · head_dim, n], in order."""
    parts = []
    for block in blocks:
        codes = unpack(block.arrays["codes"], block.settings.bits, block.head_dim)
        parts.append(np.array(codes.swapaxes(-1, -2).flatten(0, 2)))
    return np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class Bitstream:
    """A layer's cache as it would be stored: bytes by what they are."""

    payload: int
    tables: int
    raw: int

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.payload + self.tables + self.raw


def bitstream(cache: GearCache) -> Bitstream:
    """Return the size of ``cache`` with its base's codes coded, by coding them.

    For caches whose codes are held by token (base=cachegen or per_token). Errors: ``ValueError``
    for another base.
    """
    size = cache.cache_bytes()
    payload = tables = packed = 0
    for side in ("k", "v"):
        blocks = [getattr(segment, side) for segment in cache.segments]
        _check(blocks)
        if blocks:
            coded = encode(codes_by_channel(blocks), blocks[0].settings.bits)
            payload, tables = payload + coded.words.nbytes, tables + coded.tables.nbytes
        packed += sum(block.arrays["codes"].nbytes for block in blocks)
    return Bitstream(payload, tables, size.stored - packed)


def _check(blocks: list[Block]) -> None:
    """Refuse codes that do not lie by token, or with several sizes of symbols."""
    for block in blocks:
        by_token = block.settings.base in ("cachegen", "per_token")
        if not by_token or block.settings.bits != blocks[0].settings.bits:
            raise ValueError(
                f"base={block.settings.base} with {block.settings.bits} bits: only the codes of "
                "base=cachegen and per_token, with the same bits in all blocks, are coded here."
            )
