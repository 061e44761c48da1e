"""qjl: keys as signs of a random sketch, without scale or zero (arXiv:2406.03482).

    z = sign(S k), S [m, d] of N(0, 1),  k ~ √(π/2)/m · |k| · Sᵀ z,  whose product with q is the
    paper's estimate √(π/2)/m · |k| · <S q, z>: unbiased over S

Here m = b·d, so ``bits`` is what a key's entry costs. Stored: m sign bits and |k| per token and
head; S is drawn from ``sketch_seed`` and d (rotation.py). ``orthogonal`` makes the rows of S
orthogonal in blocks of d, as the authors' code does (rot=True), each still N(0, 1) by itself: error
of a key |k|²·0.57/b, against |k|²·1.57/b of independent rows. The method takes it for K alone; V is
grouped min/max codes, 2 bits in groups of 32 channels of a token, and m = 2d: the authors' defaults
(m = 256 at d = 128). No calibration. Differs from their code: no 8 outlier channels of K with a
sketch of their own (GEAR's S with base=qjl keeps outliers), no m = 4d in the first 15 layers
(gear.by_layer), a buffer of n_b = 64 tokens, where theirs has 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi, sqrt
from typing import TYPE_CHECKING, Any, ClassVar

from gear.bases import Base, Held
from gear.bytes import packed_words
from gear.checks import check_integer
from gear.methods.family import GearFamily

if TYPE_CHECKING:
    import mlx.core as mx

    from gear.config import SideSettings
    from gear.outliers import Rows
    from gear.precision import Store


class QjlBase(Base):
    """b·d signs of a sketch, times the norm."""

    name: ClassVar[str] = "qjl"
    defaults: ClassVar[Mapping[str, Any]] = {"sketch_seed": 0, "orthogonal": True}

    def check(self, side: str, s: SideSettings, where: str) -> None:
        """Refuse a seed that is none."""
        check_integer(f"{where}base_options.sketch_seed", s.option("sketch_seed"), 0, 2**32)

    def layout(self, side: str) -> dict[str, Held]:
        """Return signs and norms along tokens."""
        return {"codes": Held("codes", 2), "norm": Held("scales", 2)}

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return 4·ceil(b·D/32) and 2 bytes a token and head."""
        codes = heads * tokens * 4 * packed_words(s.bits * head_dim, 1)
        return {"codes": codes, "scales": heads * tokens * 2}

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Store norms and signs; an outlier counts as 0."""
        import mlx.core as mx

        from gear.pack import pack
        from gear.precision import scale_needs_fp32
        from gear.rotation import norms, over, product

        x = rows.filled(rows.x, 0)
        norm = norms(x)
        signs = product(over(x, norm), self._sketch(x.shape[-1], s).T) >= 0
        store.add("codes", pack(signs.astype(mx.uint8), 1), None)
        return self._base(signs, store.add("norm", norm, scale_needs_fp32(norm)), s)

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return √(π/2)/m · norm · Sᵀ z."""
        import mlx.core as mx

        from gear.pack import unpack

        signs = unpack(arrays["codes"], 1, s.bits * head_dim)
        return self._base(signs, arrays["norm"].astype(mx.float32), s)

    def _sketch(self, head_dim: int, s: SideSettings) -> mx.array:
        """Return S [m, head_dim]."""
        from gear.rotation import sketch

        seed, orthogonal = s.option("sketch_seed"), s.option("orthogonal")
        return sketch(s.bits * head_dim, head_dim, seed, orthogonal=orthogonal)

    def _base(self, signs: mx.array, norm: mx.array, s: SideSettings) -> mx.array:
        import mlx.core as mx

        from gear.rotation import product

        m = signs.shape[-1]
        turned = product(signs.astype(mx.float32) * 2 - 1, self._sketch(m // s.bits, s))
        return turned * (norm * (sqrt(pi / 2) / m))


@dataclass
class Qjl(GearFamily):
    """Signs of a sketch for K, grouped codes for V."""

    bits: int = 2
    """Signs per entry of K (m = bits · head_dim), and bits per code of V."""
    group_size: int = 32
    """Channels of V that share a scale."""

    name: ClassVar[str] = "qjl"
    switches: ClassVar[dict[str, Any]] = {
        "base": "grouped", "rank": 0, "rank_decode": 0, "sparse_frac": 0.0,
    }  # fmt: skip
    switches_k: ClassVar[dict[str, Any]] = {"base": "qjl"}
