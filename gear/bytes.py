"""Bytes of a block by the closed forms (no arrays), and what a cache holds.

Three kinds of bytes, never mixed: *accounted* (the closed form of the compressed blocks),
*buffer* (exact tokens at 2 bytes an element, whatever the compute dtype), *held* (nbytes of the
arrays). stored = accounted + buffer. This module imports no MLX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gear.bases import load_base
from gear.config import LayerSettings, SettingError, SideSettings

TERMS = ("codes", "scales", "lowrank", "outliers")


def packed_words(n: int, bits: int) -> int:
    """Return the uint32 words that ``n`` codes of ``bits`` take: ceil(n * bits / 32)."""
    return -(-n * bits // 32)


def _index_bytes(length: int, *, flat: bool) -> int:
    """Bytes of the smallest unsigned type for ``length`` places; a head's flat places from 2."""
    if length <= 2**8 and not flat:
        return 1
    return 2 if length <= 2**16 else 4


@dataclass(frozen=True)
class Width:
    """Bytes of each stored term of a block: 2 (fp16), or 4 where fp16 would lose it."""

    scale: int = 2
    zero: int = 2
    left: int = 2
    right: int = 2
    outlier: int = 2


def outlier_count(side: str, s: SideSettings, stage: str, tokens: int, head_dim: int) -> int:
    """Return the entries of S in one head of a block."""
    if stage == "post_lowrank":
        return int(s.sparse_frac * tokens * head_dim)
    vectors, n = (head_dim, tokens) if side == "k" else (tokens, head_dim)
    return 2 * min(math.floor(s.sparse_frac * n / 2 + 0.5), n // 2) * vectors


def block_terms(
    side: str, s: SideSettings, stage: str, heads: int, tokens: int, head_dim: int, rank: int,
    picked: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:  # fmt: skip
    """Return the accounted bytes of one block and batch row by term, all terms in fp16.

    ``rank`` is the block's own (prefill, decode, or picked by energy), clamped here; ``picked`` as
    of `Base.terms`, which has the formulas of codes and scales. K: low rank 2r(N+D) a head,
    outliers 2k·D·(2+i); V with the axes exchanged.
    """
    rows, cols = (head_dim, tokens) if side == "k" else (tokens, head_dim)
    base = load_base(s.base).terms(side, s, heads, tokens, head_dim, picked)
    r, n_and_d = min(rank, tokens, head_dim), tokens + head_dim
    if s.factor_bits == 16:
        lowrank = heads * 2 * r * n_and_d
    else:
        f = s.factor_bits
        lowrank = heads * (4 * r * (packed_words(tokens, f) + packed_words(head_dim, f)) + 8 * r)
    count = outlier_count(side, s, stage, tokens, head_dim)
    flat = stage == "post_lowrank"
    index = _index_bytes(tokens * head_dim if flat else cols, flat=flat)
    outliers = heads * count * (index + s.outlier_bits // 8)
    if s.outlier_bits == 8 and count:
        outliers += heads * 2 * (1 if flat else rows)
    return {**base, "lowrank": lowrank, "outliers": outliers}


def block_bytes(
    side: str, s: SideSettings, stage: str, heads: int, tokens: int, head_dim: int, rank: int,
    picked: Mapping[str, int] = MappingProxyType({}),
) -> int:  # fmt: skip
    """Return the accounted bytes of one block and batch row (see :func:`block_terms`)."""
    return sum(block_terms(side, s, stage, heads, tokens, head_dim, rank, picked).values())


def bits_per_element(
    side: str, layer: LayerSettings, heads: int, tokens: int, head_dim: int, rank: int
) -> float:
    """Return bits stored per element of a block of ``tokens`` tokens."""
    s = layer.k if side == "k" else layer.v
    size = block_bytes(side, s, layer.outlier_stage, heads, tokens, head_dim, rank)
    return 8 * size / (heads * tokens * head_dim)


def refuse_shape(layer: LayerSettings, head_dim_k: int, head_dim_v: int, index: int) -> None:
    """Raise where a base cannot take the head_dim of its side."""
    for side, s, head_dim in (("k", layer.k, head_dim_k), ("v", layer.v, head_dim_v)):
        load_base(s.base).check_shape(side, s, head_dim, f"layer {index}: gear.{side}.")


def refuse_larger_than_fp16(
    layer: LayerSettings, heads: int, head_dim_k: int, head_dim_v: int, index: int
) -> None:
    """Raise where a block of n_b tokens would cost 16 bits per element or more.

    Checks the decode block and the smallest prefill block; ``rank=None`` is charged ``max_rank``.
    """
    if layer.allow_larger_than_fp16:
        return
    for side, s, head_dim in (("k", layer.k, head_dim_k), ("v", layer.v, head_dim_v)):
        prefill = layer.max_rank if s.rank is None else s.rank
        for name, rank in (("rank", prefill), ("rank_decode", s.rank_decode)):
            cost = bits_per_element(side, layer, heads, layer.n_b, head_dim, rank)
            if cost >= 16:
                raise SettingError(
                    f"gear.{name}", rank,
                    f"small enough that a {side.upper()} block of {layer.n_b} tokens costs less "
                    f"than fp16 (layer {index}: {cost:.1f} bits per element against 16)",
                    "Lower rank, sparse_frac or bits, raise n_b, or set "
                    "gear.allow_larger_than_fp16=true.",
                )  # fmt: skip


@dataclass
class CacheBytes:
    """What one layer's cache holds. All fields in bytes but the two token counts."""

    accounted: int = 0
    buffer: int = 0
    held: int = 0
    fp16: int = 0
    tokens: int = 0
    tokens_compressed: int = 0
    terms: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*TERMS, "exact"), 0))
    prefill: int = 0
    generated: int = 0

    @property
    def stored(self) -> int:
        """accounted + buffer."""
        return self.accounted + self.buffer
