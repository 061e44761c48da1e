"""commvq: additive codes from codebooks that commute with RoPE (arXiv:2506.18879).

    keys    k = μ + Σ_s θ_s[A_s] + J·θ_s[B_s],   J turns RoPE's pairs by 90°: 2x2 blocks [[x, y],
            [-y, x]], so that R·decode(θ, μ) = decode(R·θ, R·μ) for every rotation R of RoPE
    values  v = μ + Σ_s θ_s[A_s]

Codes have 6 bits (keys' A and B are the paper's 12), and a vector bits·head_dim / 6 of them; 1-bit
codes are the first half of 2-bit ones. Stored: packed codes alone. Codebooks and μ are calibrated,
one a layer, side and head (gear/commutative.py); the file is shared and counted in none.

Keys come after RoPE here and a base knows no positions, so the codebooks, too, are of keys after
RoPE. The paper's are of keys before it: by the identity above it decodes after RoPE with turned
codebooks inside a fused attention; here dense rows are rebuilt. Calibrate on windows as long as
what is to be read: other positions turn keys where no entry was fitted. Further, hard assignment
and a ridge in place of annealed soft EM, search again code by code after the greedy one, and no
norm per token. For values the paper trains an encoder (an MLP with Gumbel softmax) and binary codes
end to end, all heads at once; here they get the keys' residual fit without J, head by head.
What GEAR's outliers hold counts as the mean. Calibration: required; scripts/calibrate.py.
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


class CommVqBase(Base):
    """Codes of additive codebooks, ``bits`` an element."""

    name: ClassVar[str] = "commvq"
    defaults: ClassVar[Mapping[str, Any]] = {"code_bits": 6, "calibration": ""}
    fit_uses: ClassVar[tuple[str, ...]] = ("bits", "code_bits")

    def check(self, side: str, s: SideSettings, where: str) -> None:
        """Refuse codes that cannot be packed, and settings without a calibration file."""
        check_integer(f"{where}base_options.code_bits", s.option("code_bits"), 1, 8)
        if side and not s.option("calibration"):
            raise SettingError(
                f"{where}base_options.calibration", "", "a calibration file: its codebooks",
                f"Make one with: python scripts/calibrate.py method={self.name} model=… dataset=…; "
                "run.py finds it with calibration: auto, or name it.",
            )  # fmt: skip

    def check_shape(self, side: str, s: SideSettings, head_dim: int, where: str) -> None:
        """Refuse keys of no whole pairs, and vectors without a code."""
        if side == "k" and head_dim % 2:
            wanted = f"another base, as head_dim {head_dim} has no pairs"
            raise SettingError(f"{where}base", s.base, wanted)
        if not _stages(side, s, head_dim):
            most = s.bits * head_dim // (1 + (side == "k"))
            name = f"{where}base_options.code_bits"
            raise SettingError(name, s.option("code_bits"), f"at most {most} here")

    def layout(self, side: str) -> dict[str, Held]:
        """Return the codes of each token."""
        return {"codes": Held("codes", 2)}

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return 4·ceil(n·c/32) a token and head, for n codes of c bits."""
        words = packed_words(_codes(side, s, head_dim), s.option("code_bits"))
        return {"codes": heads * tokens * 4 * words, "scales": 0}

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Store the codes that were found."""
        from gear.commutative import calibrated, encode
        from gear.pack import pack

        shape = _shape(rows.side, s, rows.x.shape[1], rows.x.shape[-1])
        codebook, mean = calibrated(s.option("calibration"), rows.side, shape)
        codes = encode(rows.filled(rows.x - mean, 0), codebook, rows.side == "k")
        store.add("codes", pack(codes, s.option("code_bits")), None)
        return self.read(store.arrays, rows.side, s, *rows.x.shape[-2:])

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return the mean and the entries' sum; without a block axis as `store` has none."""
        from gear.commutative import calibrated, decode
        from gear.pack import unpack

        words, bits = arrays["codes"], s.option("code_bits")
        shape = _shape(side, s, words.shape[1], head_dim)
        codebook, mean = calibrated(s.option("calibration"), side, shape)
        codes = unpack(words, bits, _codes(side, s, head_dim))
        centre = mean.reshape(words.shape[1], *[1] * (words.ndim - 3), head_dim)
        return decode(codes, codebook, side == "k") + centre

    def fit(self, side: str, x: mx.array, s: SideSettings, seed: int) -> dict[str, mx.array]:
        """Return the tensors of one layer and side, fitted on x [n, heads, tokens, head_dim]."""
        import mlx.core as mx
        import numpy as np

        from gear.commutative import fit

        _, stages, size, _ = _shape(side, s, x.shape[1], x.shape[-1])
        values = np.array(mx.moveaxis(x.astype(mx.float32), 0, 1).flatten(1, 2))
        codebook, mean = fit(values, stages, size, side == "k", seed)
        return {"codebook": mx.array(codebook), "mean": mx.array(mean)}


def _stages(side: str, s: SideSettings, head_dim: int) -> int:
    """Return the stages: of one code for values, of two for keys."""
    return s.bits * head_dim // (s.option("code_bits") * (1 + (side == "k")))


def _codes(side: str, s: SideSettings, head_dim: int) -> int:
    """Return the codes of a vector."""
    return _stages(side, s, head_dim) * (1 + (side == "k"))


def _shape(side: str, s: SideSettings, heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Return the codebook's shape."""
    return heads, _stages(side, s, head_dim), 2 ** s.option("code_bits"), head_dim


@dataclass
class CommVq(GearFamily):
    """Codes of calibrated codebooks alone."""

    bits: int = 2
    """Bits an element: how many codes a vector has."""
    code_bits: int = 6
    """Bits of a code, 1..8."""
    calibration: str = ""
    """The file of codebooks, which scripts/calibrate.py makes; auto: the one that fits."""

    name: ClassVar[str] = "commvq"
    switches: ClassVar[dict[str, Any]] = {"base": "commvq", "rank": 0, "rank_decode": 0,
                                          "sparse_frac": 0.0}  # fmt: skip
