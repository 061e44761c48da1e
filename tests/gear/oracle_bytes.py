"""fp64 oracle, part 3: the closed form of the accounted bytes of one block.

Every term is written out per head (``vector`` V, whose scales span the heads, per token), as in
GEAR's storage layout: codes packed into 32-bit words, one scale and zero a group, L and R, values
and indices of the outliers. ``widths`` says which terms had to be fp32; fp16 counts 2 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from tests.gear.oracle_base import outlier_count

HALF: Mapping[str, int] = {"scale": 2, "zero": 2, "left": 2, "right": 2, "values": 2}


@dataclass(frozen=True)
class Block:
    """What the bytes of one block depend on; ``rank`` is the rank really held."""

    side: str
    heads: int
    tokens: int
    head_dim: int
    bits: int
    base: str
    group_size: int
    rank: int
    sparse_frac: float
    outlier_stage: str
    factor_bits: int = 16
    outlier_bits: int = 16
    scale_bits: int = 16
    widths: Mapping[str, int] = field(default_factory=lambda: HALF)


def index_bytes(entries: int) -> int:
    """Return the bytes of an index into a vector of ``entries`` (paper order)."""
    return 1 if entries <= 256 else 2 if entries <= 65_536 else 4


def axes(b: Block) -> tuple[int, int]:
    """Return the rows of codes a head and the entries of each: K by channel but for per_token."""
    by_channel = b.side == "k" and b.base != "per_token"
    return (b.head_dim, b.tokens) if by_channel else (b.tokens, b.head_dim)


def codes_bytes(b: Block) -> int:
    """Packed codes: K along tokens for each channel, else along channels for each token."""
    across, along = axes(b)
    return b.heads * 4 * across * ceil(along * b.bits / 32)


def scale_bytes(b: Block) -> int:
    """Scale and zero of every group; at 8 bits two bytes a group and two ranges a family."""
    across, along = axes(b)
    families = b.heads * (1 if b.base == "vector" else ceil(along / b.group_size))
    if b.base == "vector" and b.side == "v":
        families = 1
    pair = b.widths["scale"] + b.widths["zero"]
    if b.scale_bits == 8:
        return families * (2 * across + 2 * pair)
    return families * across * pair


def lowrank_bytes(b: Block) -> int:
    """L [tokens, rank] and R [rank, head_dim], or their packed codes with a grid a column."""
    left, right = b.widths["left"], b.widths["right"]
    if b.factor_bits == 16:
        return b.heads * b.rank * (left * b.tokens + right * b.head_dim)
    words = ceil(b.tokens * b.factor_bits / 32) + ceil(b.head_dim * b.factor_bits / 32)
    return b.heads * b.rank * (4 * words + 2 * left + 2 * right)


def outlier_bytes(b: Block) -> int:
    """Values and indices; at 8 bits also one scale a vector (port order: a head)."""
    width = b.widths["values"]
    if b.outlier_stage == "post_lowrank":
        count = int(b.sparse_frac * b.tokens * b.head_dim)
        index = 2 if b.tokens * b.head_dim <= 65_536 else 4
        if b.outlier_bits == 8:
            return b.heads * (count * (1 + index) + width) if count else 0
        return b.heads * count * (width + index)
    vectors, length = (b.head_dim, b.tokens) if b.side == "k" else (b.tokens, b.head_dim)
    count = 2 * outlier_count(b.sparse_frac, length)
    index = index_bytes(length)
    if b.outlier_bits == 8:
        return b.heads * vectors * (count * (1 + index) + width) if count else 0
    return b.heads * vectors * count * (width + index)


def terms(b: Block) -> dict[str, int]:
    """Return the accounted bytes of each term of one block."""
    return {
        "codes": codes_bytes(b),
        "scales": scale_bytes(b),
        "lowrank": lowrank_bytes(b),
        "outliers": outlier_bytes(b),
    }


def accounted(b: Block) -> int:
    """Return the accounted bytes of one block."""
    return sum(terms(b).values())
