"""vecinfer: vector quantization of smoothed, rotated keys, and of values (arXiv:2510.06175).

    keys    z = H (k / λ),  λ = √max|K| per channel and head, H Walsh-Hadamard / √d
            parts of 4 coordinates, each the nearest of 4096 entries:  3 bits an element
    values  parts of 8 channels, each the nearest of 256 entries:      1 bit an element

Stored: packed codes alone. λ and the codebooks come from a file; it is shared by all caches and
counted in none. k-means (gear/codebook.py) fits one codebook a layer and side for all heads, parts.

The paper folds λ and H into the query and fuses attention with tables of the codebook in a CUDA
kernel. Here keys, as the cache gets them, are rebuilt. What GEAR's outliers hold counts as 0.
Calibration: required; scripts/calibrate.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gear.bases import Base, Held
from gear.bytes import packed_words
from gear.checks import SettingError, check_integer
from gear.methods.family import GearFamily

if TYPE_CHECKING:
    import mlx.core as mx

    from gear.config import SideSettings
    from gear.outliers import Rows
    from gear.precision import Store

_NAMES = {"k": "key", "v": "value"}


class VecInferBase(Base):
    """Numbers of codebook entries."""

    name: ClassVar[str] = "vecinfer"
    defaults: ClassVar[Mapping[str, Any]] = {"key_dims": 4, "key_code_bits": 12, "value_dims": 8,
                                             "value_code_bits": 8, "calibration": ""}  # fmt: skip
    fit_uses = tuple(defaults.keys() - {"calibration"})

    def check(self, side: str, s: SideSettings, where: str) -> None:
        """Refuse codes that cannot be packed, and settings without a calibration file."""
        for name in self.defaults.keys() - {"calibration"}:
            most = 16 if name.endswith("bits") else 64
            check_integer(f"{where}base_options.{name}", s.option(name), 1, most)
        if side and not s.option("calibration"):
            raise SettingError(
                f"{where}base_options.calibration", "", "a calibration file: its codebooks",
                f"Make one with: python scripts/calibrate.py method={self.name} model=… dataset=…; "
                "run.py finds it with calibration: auto, or name it.",
            )  # fmt: skip

    def check_shape(self, side: str, s: SideSettings, head_dim: int, where: str) -> None:
        """Refuse a head_dim of no whole parts, for K one without a Walsh-Hadamard matrix."""
        dims, _ = _parts(side, s)
        if head_dim % dims:
            name = f"{where}base_options.{_NAMES[side]}_dims"
            raise SettingError(name, dims, f"a divisor of head_dim {head_dim}")
        if side == "k" and head_dim & (head_dim - 1):
            wanted = f"another base, as head_dim {head_dim} is no power of two"
            raise SettingError(f"{where}base", s.base, wanted)

    def layout(self, side: str) -> dict[str, Held]:
        """Return the codes of each token."""
        return {"codes": Held("codes", 2), "codes_high": Held("codes", 2)}

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return 4·(ceil(n·8/32) + ceil(n·(b-8)/32)) a token and head, for n parts of b bits."""
        dims, bits = _parts(side, s)
        widths = min(bits, 8), max(bits - 8, 0)
        words = sum(packed_words(head_dim // dims, width) for width in widths)
        return {"codes": heads * tokens * 4 * words, "scales": 0}

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Store the numbers of the nearest entries."""
        import mlx.core as mx

        from gear.codebook import calibrated, nearest, store_codes

        (dims, bits), heads = _parts(rows.side, s), rows.x.shape[1] * (rows.side == "k")
        wanted = rows.side, (2**bits, dims), heads
        codebook, smooth = calibrated(s.option("calibration"), *wanted)
        x = rows.filled(rows.x, 0)
        x = mx.hadamard_transform(x / smooth[:, None]) if rows.side == "k" else x
        store_codes(store, nearest(x.reshape(*x.shape[:-1], -1, dims), codebook), bits)
        return self.read(store.arrays, rows.side, s, *rows.x.shape[-2:])

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return the entries, K rotated back; without a block axis as `store` has none."""
        import mlx.core as mx

        from gear.codebook import calibrated, read_codes

        (dims, bits), heads = _parts(side, s), arrays["codes"].shape[1] * (side == "k")
        codebook, smooth = calibrated(s.option("calibration"), side, (2**bits, dims), heads)
        x = codebook[read_codes(arrays, bits, head_dim // dims)].flatten(-2)
        if side == "v":
            return x
        return mx.hadamard_transform(x) * smooth.reshape(heads, *[1] * (x.ndim - 3), head_dim)

    def fit(self, side: str, x: mx.array, s: SideSettings, seed: int) -> dict[str, mx.array]:
        """Return the tensors of one layer and side, fitted on x [n, heads, tokens, head_dim]."""
        import mlx.core as mx
        import numpy as np

        from gear.codebook import k_means

        dims, bits = _parts(side, s)
        x, found = x.astype(mx.float32), {}
        if side == "k":
            smooth = mx.sqrt(mx.abs(x).max(axis=(0, 2)))
            found["smooth"] = mx.where(smooth > 0, smooth, 1)
            x = mx.hadamard_transform(x / found["smooth"][:, None])
        entries = k_means(np.array(x).reshape(-1, dims), 2**bits, seed)
        return {**found, "codebook": mx.array(entries)}


def _parts(side: str, s: SideSettings) -> tuple[int, int]:
    """Return the coordinates of a part, and the bits of its code."""
    kind = _NAMES[side]
    return s.option(f"{kind}_dims"), s.option(f"{kind}_code_bits")


@dataclass
class VecInfer(GearFamily):
    """Codes of calibrated codebooks alone."""

    key_dims: int = 4
    """Coordinates of a part of a key."""
    key_code_bits: int = 12
    """Bits of its code, 1..16."""
    value_dims: int = 8
    """Channels of a part of a value."""
    value_code_bits: int = 8
    """Bits of its code, 1..16."""
    calibration: str = ""
    """The file of codebooks, which scripts/calibrate.py makes; auto: the one that fits."""

    name: ClassVar[str] = "vecinfer"
    switches: ClassVar[dict[str, Any]] = {"base": "vecinfer", "rank": 0, "rank_decode": 0,
                                          "sparse_frac": 0.0}  # fmt: skip
