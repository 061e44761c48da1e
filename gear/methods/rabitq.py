"""rabitq: signs of a rotated, centred vector, and the factor that makes them unbiased.

    u = Π (x - c) / |x - c|,  g = the grid point nearest in angle to u,  x ~ c + f · Πᵀ g,
    f = |x - c| / <g, u>: then <x, q> ~ <c, q> + |x - c| · <ō, q> / <ō, o>, the paper's estimate

RaBitQ (SIGMOD 2024, arXiv:2405.12497) has g = ±1/2, one bit. Extended RaBitQ (arXiv:2409.09913) has
more: g from -(2^b - 1)/2 to (2^b - 1)/2, scaled before rounding to lie best. c is the mean of a
head's tokens over the block. Stored: packed codes and f per token and head, c per head and block;
Π is drawn from ``rotation_seed`` and head_dim (rotation.py). Unbiased means longer than nearest: at
1 bit the error is |x - c|²·(π/2 - 1), where the least would be 0.36. No calibration.
- rabitq takes 1 bit for K and, as values are summed and not searched, grouped min/max codes for V
- rabitq_extended takes b bits for both
Differs from the papers: Π is Hadamard with random signs, twice, where head_dim is a power of two;
c is a block's mean, not an IVF cluster's; f alone is stored, as norms serve only distances; queries
stay exact, where the paper's have 4 bits; 13 scales are tried, not every one that changes a code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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

_REACHES = [1 - i / 24 for i in range(13)]  # grid ends, as shares of the largest coordinate


class RabitqBase(Base):
    """The best grid point of a rotated direction, times a factor."""

    name: ClassVar[str] = "rabitq"
    defaults: ClassVar[Mapping[str, Any]] = {"rotation_seed": 0}

    def check(self, side: str, s: SideSettings, where: str) -> None:
        """Refuse a seed that is none."""
        check_integer(f"{where}base_options.rotation_seed", s.option("rotation_seed"), 0, 2**32)

    def layout(self, side: str) -> dict[str, Held]:
        """Return codes and factors along tokens, and a block's centre."""
        return {"codes": Held("codes", 2), "factor": Held("scales", 2), "centre": Held("scales")}

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return 4·ceil(D·b/32) and 2 bytes a token, and 2·D bytes, a head."""
        codes = heads * tokens * 4 * packed_words(head_dim, s.bits)
        return {"codes": codes, "scales": heads * 2 * (tokens + head_dim)}

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Store centre, codes and factors; an outlier counts as its channel's centre."""
        import mlx.core as mx

        from gear.pack import pack
        from gear.precision import scale_needs_fp32, zero_needs_fp32
        from gear.rotation import norms, over, rotate

        share = rows.filled(mx.ones_like(rows.x), 0)
        share = share / mx.maximum(share.sum(axis=2, keepdims=True), 1)
        centre = (rows.filled(rows.x, 0) * share).sum(axis=2, keepdims=True)
        away = rows.filled(mx.abs(rows.x - centre), 0).mean(axis=(2, 3), keepdims=True)
        centre = store.add("centre", centre, zero_needs_fp32(centre, away))
        x = rows.filled(rows.x - centre, 0)
        norm = norms(x)
        u = rotate(over(x, norm), s.option("rotation_seed"))
        codes = _nearest(u, s.bits)
        store.add("codes", pack(codes, s.bits), None)
        # a grid point has the signs of u, so only u = 0 has no product with it
        factor = over(norm, (_grid(codes, s.bits) * u).sum(axis=-1, keepdims=True))
        factor = store.add("factor", factor, scale_needs_fp32(factor))
        return self._base(codes, factor, centre, s)

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return centre + factor times the grid point, rotated back."""
        import mlx.core as mx

        from gear.pack import unpack

        factor, centre = (arrays[name].astype(mx.float32) for name in ("factor", "centre"))
        return self._base(unpack(arrays["codes"], s.bits, head_dim), factor, centre, s)

    def _base(self, codes: mx.array, factor: mx.array, c: mx.array, s: SideSettings) -> mx.array:
        from gear.rotation import rotate_back

        return c + factor * rotate_back(_grid(codes, s.bits), s.option("rotation_seed"))


def _grid(codes: mx.array, bits: int) -> mx.array:
    """Return the grid point of codes: 0 .. 2^bits - 1 about 0."""
    import mlx.core as mx

    return codes.astype(mx.float32) - (2**bits - 1) / 2


def _nearest(u: mx.array, bits: int) -> mx.array:
    """Return the codes, uint8, of the grid point with the largest cosine to each vector of u."""
    import mlx.core as mx

    from gear.placement import release
    from gear.rotation import norms, over

    half, peak = 2 ** (bits - 1), mx.abs(u).max(axis=-1, keepdims=True)
    unit, best, codes = over(u, peak) * half, mx.array(-1.0), mx.array(0, mx.uint8)
    for reach in _REACHES if bits > 1 else _REACHES[:1]:
        found = mx.clip(mx.floor(unit / reach) + half, 0, 2 * half - 1).astype(mx.uint8)
        g = _grid(found, bits)
        cosine = (g * u).sum(axis=-1, keepdims=True) / norms(g)
        codes, best = mx.where(cosine > best, found, codes), mx.maximum(cosine, best)
        release(codes, best)  # one candidate's temporaries at a time
    return codes


_ALONE = {"rank": 0, "rank_decode": 0, "sparse_frac": 0.0}


@dataclass
class Rabitq(GearFamily):
    """Sign bits of K, grouped codes of V."""

    bits: int = 2
    """Bits per code of V; K has 1."""

    name: ClassVar[str] = "rabitq"
    switches: ClassVar[dict[str, Any]] = {"base": "grouped", **_ALONE}
    switches_k: ClassVar[dict[str, Any]] = {"base": "rabitq", "bits": 1}


@dataclass
class RabitqExtended(GearFamily):
    """Grid codes of K and V."""

    bits: int = 4
    """Bits per code, 1..8."""

    name: ClassVar[str] = "rabitq_extended"
    switches: ClassVar[dict[str, Any]] = {"base": "rabitq", **_ALONE}
