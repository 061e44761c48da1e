"""turboquant_prod: TurboQuant's unbiased form, for inner products (arXiv:2504.19874, algorithm 2).

    y = Π x / |x|,  e = y - level[code] of b - 1 bits,  γ = |e|,  z = sign(S e),  S [d, d] N(0, 1)
    x ~ |x| · Πᵀ (level[code] + γ · √(π/2)/d · Sᵀ z)

The nearest level shrinks a vector, and with it every score; over S the second term's mean is e, so
<q, x> is unbiased, with variance |q|²|x|²/d · (0.57, 0.18, 0.054) at 2 to 4 bits. Stored: packed
codes of b - 1 bits, d sign bits, |x| and γ per token and head. No calibration. The method takes it
for K; V, which is summed and not searched, has algorithm 1 at b bits (turboquant.py), of a fifth
of the error. Differs from the paper as turboquant.py does, and: S acts after Π, not before
it, which is the same in distribution and one rotation less; ``orthogonal`` (an option of the base
under GEAR, off) takes orthogonal rows of the same law for S: about a third of the variance.
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
from gear.normal_levels import MOST_BITS

if TYPE_CHECKING:
    import mlx.core as mx

    from gear.config import SideSettings
    from gear.outliers import Rows
    from gear.precision import Store


class TurboQuantProdBase(Base):
    """Levels of b - 1 bits and the signs of a sketch of what they leave."""

    name: ClassVar[str] = "turboquant_prod"
    defaults: ClassVar[Mapping[str, Any]] = {"rotation_seed": 0, "orthogonal": False}

    def check(self, side: str, s: SideSettings, where: str) -> None:
        """Refuse bits that leave no code beside the sign, or for which there is no table."""
        check_integer(f"{where}bits", s.bits, 2, MOST_BITS + 1)
        check_integer(f"{where}base_options.rotation_seed", s.option("rotation_seed"), 0, 2**32)

    def layout(self, side: str) -> dict[str, Held]:
        """Return codes, signs, norms and γ along tokens."""
        codes, scales = Held("codes", 2), Held("scales", 2)
        return {"codes": codes, "signs": codes, "norm": scales, "rest": scales}

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return 4·(ceil(D·(b-1)/32) + ceil(D/32)) and 4 bytes a token and head."""
        words = packed_words(head_dim, s.bits - 1) + packed_words(head_dim, 1)
        return {"codes": heads * tokens * 4 * words, "scales": heads * tokens * 4}

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Store norms and codes, then γ and signs of what they leave; an outlier counts as 0."""
        import mlx.core as mx

        from gear.methods.turboquant import rotated_codes
        from gear.pack import pack
        from gear.precision import scale_needs_fp32
        from gear.rotation import norms, product

        norm, levels, y = rotated_codes(store, rows, s.bits - 1, s.option("rotation_seed"))
        rest = norms(y - levels)
        signs = product(y - levels, self._sketch(levels, s).T) >= 0
        store.add("signs", pack(signs.astype(mx.uint8), 1), None)
        return self._base(norm, levels, store.add("rest", rest, scale_needs_fp32(rest)), signs, s)

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return levels and the estimate of what they left, rotated back, times the norm."""
        import mlx.core as mx

        from gear.methods.turboquant import read_levels
        from gear.pack import unpack

        norm, rest = (arrays[name].astype(mx.float32) for name in ("norm", "rest"))
        levels = read_levels(arrays, s.bits - 1, head_dim)
        return self._base(norm, levels, rest, unpack(arrays["signs"], 1, head_dim), s)

    def _sketch(self, levels: mx.array, s: SideSettings) -> mx.array:
        """Return S [d, d]."""
        from gear.rotation import sketch

        d, seed = levels.shape[-1], s.option("rotation_seed")
        return sketch(d, d, seed, orthogonal=s.option("orthogonal"))

    def _base(
        self, norm: mx.array, levels: mx.array, rest: mx.array, signs: mx.array, s: SideSettings
    ) -> mx.array:
        import mlx.core as mx

        from gear.rotation import product, rotate_back

        d = levels.shape[-1]
        turned = product(signs.astype(mx.float32) * 2 - 1, self._sketch(levels, s))
        y = levels + rest * (sqrt(pi / 2) / d) * turned
        return rotate_back(y, s.option("rotation_seed")) * (norm / sqrt(d))


@dataclass
class TurboQuantProd(GearFamily):
    """Unbiased codes of K, least-error codes of V."""

    bits: int = 4
    """Bits per entry, 2..4: K has one of them as the sign of the sketch."""

    name: ClassVar[str] = "turboquant_prod"
    switches: ClassVar[dict[str, Any]] = {
        "base": "turboquant", "rank": 0, "rank_decode": 0, "sparse_frac": 0.0,
    }  # fmt: skip
    switches_k: ClassVar[dict[str, Any]] = {"base": "turboquant_prod"}
