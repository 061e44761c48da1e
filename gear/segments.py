"""The compressed past of one layer: K and V blocks that cover the same tokens, in order."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from gear.block import Block
from gear.bytes import block_bytes


@dataclass
class Segment:
    """Equal blocks of K and V for the same tokens.

    ``valid`` counts the tokens still meant (trimming inside a block only lowers it); ``grows``
    says whether an equal block may join: never once it was trimmed. Chunks of a long prefill are
    equal blocks too.
    """

    k: Block
    v: Block
    valid: int
    grows: bool
    prefill: bool

    @property
    def tokens(self) -> int:
        """Tokens the blocks were made of."""
        return self.k.tokens * self.k.count

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held."""
        return self.k.nbytes + self.v.nbytes

    def accepts(self, other: Segment) -> bool:
        """Say whether ``other`` may be joined to this segment."""
        both = self.grows and other.grows and self.prefill == other.prefill
        return both and self.k.matches(other.k) and self.v.matches(other.v)

    def join(self, other: Segment) -> None:
        """Take over the blocks of ``other``."""
        self.k, self.v = self.k.joined(other.k), self.v.joined(other.v)
        self.valid += other.valid

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens (at most ``valid``); return how many. Drops whole blocks."""
        n = min(n, self.valid)
        self.valid -= n
        self.grows = False
        blocks = -(-self.valid // self.k.tokens)
        if 0 < blocks < self.k.count:
            self.k, self.v = self.k.first(blocks), self.v.first(blocks)
        return n

    def reconstruct(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Return dense K and V [batch, heads, valid, head_dim]."""
        k, v = self.k.reconstruct(dtype), self.v.reconstruct(dtype)
        return k[:, :, : self.valid], v[:, :, : self.valid]


def accounted_bytes(block: Block, stage: str, heads: int) -> int:
    """Return a block's bytes by the closed form, with its fp32 terms counted as what they are."""
    one = block_bytes(
        block.side, block.settings, stage, heads, block.tokens, block.head_dim, block.rank,
        block.quantizer.picked(block.arrays),
    )  # fmt: skip
    wide = sum(a.nbytes // 2 for a in block.arrays.values() if a.dtype == mx.float32)
    return one * block.batch * block.count + wide
