"""turboquant: random rotation, Lloyd-Max levels per coordinate (arXiv:2504.19874, algorithm 1).

    y = Π x / |x|,  x ~ |x| · Πᵀ level[code],  levels those of N(0, 1/d), nearest one taken

A rotated unit vector's coordinates are close to N(0, 1/d) whatever x was, so one table serves all:
error |x|² · (0.36, 0.117, 0.034, 0.0094) at 1 to 4 bits. Stored: packed codes and |x| per token and
head; Π is drawn from ``rotation_seed`` and head_dim (rotation.py). No calibration.
Differs from the paper: Π is Hadamard with random signs, twice, where head_dim is a power of two
(the paper: QR of a Gaussian matrix, as ours elsewhere); levels of the normal limit, not of the
sphere at d; whole bits, where the paper gives outlier channels one more (2.5 and 3.5 bits on
average); tokens wait exact until a block of n_b is full, the paper quantizes each as it comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar

from gear.bases import Base, Held
from gear.bytes import packed_words
from gear.checks import check_integer
from gear.methods.family import GearFamily
from gear.normal_levels import MOST_BITS, normal_levels

if TYPE_CHECKING:
    import mlx.core as mx

    from gear.config import SideSettings
    from gear.outliers import Rows
    from gear.precision import Store


def rotated_codes(
    store: Store, rows: Rows, bits: int, seed: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Store norms and codes; return norms, levels and coordinates, the last two of Π x √d / |x|."""
    from gear.nuq import nearest
    from gear.pack import pack
    from gear.precision import scale_needs_fp32
    from gear.rotation import norms, over, rotate

    x = rows.filled(rows.x, 0)
    norm = norms(x)
    norm = store.add("norm", norm, scale_needs_fp32(norm))
    y = rotate(over(x, norm), seed) * sqrt(x.shape[-1])
    levels = _table(bits)
    codes = nearest(y, levels)
    store.add("codes", pack(codes, bits), None)
    return norm, levels[codes], y


def read_levels(arrays: Mapping[str, mx.array], bits: int, head_dim: int) -> mx.array:
    """Return the level of each stored code."""
    from gear.pack import unpack

    return _table(bits)[unpack(arrays["codes"], bits, head_dim)]


def _table(bits: int) -> mx.array:
    """Return the levels as an array."""
    import mlx.core as mx

    return mx.array(normal_levels(bits))


class TurboQuantBase(Base):
    """Levels of a rotated unit vector, times its norm."""

    name: ClassVar[str] = "turboquant"
    defaults: ClassVar[Mapping[str, Any]] = {"rotation_seed": 0}

    def check(self, side: str, s: SideSettings, where: str) -> None:
        """Refuse bits for which there is no table."""
        check_integer(f"{where}bits", s.bits, 1, MOST_BITS)
        check_integer(f"{where}base_options.rotation_seed", s.option("rotation_seed"), 0, 2**32)

    def layout(self, side: str) -> dict[str, Held]:
        """Return codes and norms along tokens."""
        return {"codes": Held("codes", 2), "norm": Held("scales", 2)}

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return 4·ceil(D·b/32) and 2 bytes a token and head."""
        codes = heads * tokens * 4 * packed_words(head_dim, s.bits)
        return {"codes": codes, "scales": heads * tokens * 2}

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Store norms and codes; an outlier counts as 0."""
        norm, levels, _ = rotated_codes(store, rows, s.bits, s.option("rotation_seed"))
        return self._base(norm, levels, s)

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return the levels, rotated back, times the norm."""
        import mlx.core as mx

        norm = arrays["norm"].astype(mx.float32)
        return self._base(norm, read_levels(arrays, s.bits, head_dim), s)

    def _base(self, norm: mx.array, levels: mx.array, s: SideSettings) -> mx.array:
        from gear.rotation import rotate_back

        return rotate_back(levels, s.option("rotation_seed")) * (norm / sqrt(levels.shape[-1]))


@dataclass
class TurboQuant(GearFamily):
    """Lloyd-Max codes of rotated K and V."""

    bits: int = 4
    """Bits per code, 1..4."""
    rotation_seed: int = 0
    """Seed of the rotation."""

    name: ClassVar[str] = "turboquant"
    switches: ClassVar[dict[str, Any]] = {
        "base": "turboquant", "rank": 0, "rank_decode": 0, "sparse_frac": 0.0,
    }  # fmt: skip
