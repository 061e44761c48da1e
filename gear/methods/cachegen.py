"""cachegen: tokens as differences to an anchor, coarser in later layers (arXiv:2310.07240).

    of every ``tokens`` (10) tokens the first is the anchor, 8 bits; the others: b of x - anchor
    b = 4, 3, 2 in the first, second and last third of the layers

Both are min/max codes in groups of group_size channels of one token and head, and differences are
to the anchor as it is stored. Stored: packed codes, scales and zeros of both.

CacheGen is for storing and sending a cache: it codes the symbols arithmetically, with a
distribution per layer and channel. gear/entropy.py does so with the codes held, and back exactly.
The size of that bitstream is a number of its own, and no part of the bytes a cache is said to hold.

The paper's quantizer is symmetric with one scale a token and bins of .5, 1, 1.5; its chunks have
1.5K tokens, our blocks n_b; its distributions are profiled offline. No calibration here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from gear.bases import Base, Held
from gear.bytes import packed_words
from gear.checks import check_integer
from gear.config import LayerConfig
from gear.methods.family import GearFamily

if TYPE_CHECKING:
    import mlx.core as mx

    from gear.config import LayerSettings, SideSettings
    from gear.outliers import Rows
    from gear.precision import Store

_TERMS = {"codes": "codes", "scale": "scales", "zero": "scales"}


class CacheGenBase(Base):
    """8-bit anchors and the b-bit differences of other tokens to them."""

    name: ClassVar[str] = "cachegen"
    defaults: ClassVar[Mapping[str, Any]] = {"tokens": 10}

    def check(self, side: str, s: SideSettings, where: str) -> None:
        """Refuse groups without a difference."""
        check_integer(f"{where}base_options.tokens", s.option("tokens"), 2)

    def default_block(self, s: SideSettings) -> int:
        """Return whole groups of 60 tokens or more."""
        return s.option("tokens") * -(-60 // s.option("tokens"))

    def unit(self, side: str, s: SideSettings) -> int:
        """Return the tokens of a group."""
        return s.option("tokens")

    def cut_unit(self, side: str, s: SideSettings) -> int | None:
        """Return the tokens of a group."""
        return s.option("tokens")

    def layout(self, side: str) -> dict[str, Held]:
        """Return codes, scales and zeros of anchors and of differences, along tokens."""
        both = [
            (prefix + name, term) for prefix in ("", "anchor_") for name, term in _TERMS.items()
        ]
        return {name: Held(term, joined=2) for name, term in both}

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return 4·ceil(head_dim·b/32) a token (an anchor: b = 8), and 4 a group of channels."""
        anchors = tokens // s.option("tokens")
        words = anchors * packed_words(head_dim, 8)
        words += (tokens - anchors) * packed_words(head_dim, s.bits)
        groups = tokens * -(-head_dim // s.group_size)
        return {"codes": heads * 4 * words, "scales": heads * 4 * groups}

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Store anchors, then what the stored anchors leave of the other tokens."""
        from gear.delta import store_anchored

        return store_anchored(store, rows, s.option("tokens"), s.bits, s.group_size)

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return anchors, and anchor + difference."""
        from gear.delta import read_anchored

        return read_anchored(arrays, head_dim, s.option("tokens"), s.bits, s.group_size)

    def cut(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, start: int, stop: int
    ) -> dict[str, mx.array]:
        """Return the anchors and the differences of whole groups."""
        first, last = start // s.option("tokens"), stop // s.option("tokens")
        spans = {True: slice(first, last), False: slice(start - first, stop - last)}
        return {n: a[:, :, spans[n.startswith("anchor_")]] for n, a in arrays.items()}


@dataclass
class CacheGen(GearFamily):
    """Differences to anchors, with bits by thirds of the layers."""

    first_bits: int = 4
    """Bits of the differences in the first third of the layers."""
    middle_bits: int = 3
    """In the second third."""
    last_bits: int = 2
    """In the last third."""
    tokens: int = 10
    """Tokens of a group; the first is its anchor."""

    name: ClassVar[str] = "cachegen"
    aside: ClassVar[frozenset[str]] = frozenset({"first_bits", "middle_bits", "last_bits"})
    switches: ClassVar[dict[str, Any]] = {
        "base": "cachegen", "rank": 0, "rank_decode": 0, "sparse_frac": 0.0,
        "clip": False, "scale_bits": 16,
    }  # fmt: skip

    def layers(self, n_layers: int) -> list[LayerSettings]:
        """Return the validated settings per layer, bits by thirds."""
        thirds = self.first_bits, self.middle_bits, self.last_bits
        by_layer = {}
        for index in range(n_layers):
            old, bits = (
                self.settings.by_layer.get(index, LayerConfig()),
                thirds[3 * index // n_layers],
            )
            by_layer[index] = LayerConfig(replace(old.k, bits=bits), replace(old.v, bits=bits))
        settings = replace(self.settings, by_layer={**self.settings.by_layer, **by_layer})
        return GearFamily.layers(replace(self, settings=settings), n_layers)
