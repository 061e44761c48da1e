"""kvquant: non-uniform levels per channel of K and token of V, outliers apart (arXiv:2401.18079).

    x ~ level[code], 2^b levels by Lloyd-Max (nuq.py); 1% of each vector in S; first token exact

A vector is a head's channel over the block (K) or a token of a head (V). Outliers are GEAR's S: the
ends of each vector, out of the fit. n_b = 128 is the least at which K has some at 1%; V has from
head_dim 100 on. Stored: packed codes, and by ``signposts``
- ``vector`` (as the VeloxQuant-MLX port): 2^b levels a vector, fitted on the block;
- ``shared`` (nearer the paper, far fewer bytes): scale and zero a vector, which bring it to [0, 1],
  and 2^b levels a head and block; with ``calibration``, a file of ``LAYER.SIDE.signposts`` [2^b] or
  [heads, 2^b] ascending in [0, 1], the file's levels, which take no bytes (the paper's way).
  scripts/calibrate.py fits one set a layer and side, each window of text one block.
The paper weights that fit by Fisher information, takes K's ranges from the text too, has V's
outliers of all heads together, and quantizes K before RoPE; here it is after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gear.bases import Base, Held
from gear.bytes import packed_words
from gear.checks import check_integer, check_one_of
from gear.methods.family import GearFamily

if TYPE_CHECKING:
    import mlx.core as mx

    from gear.config import SideSettings
    from gear.outliers import Rows
    from gear.precision import Store


class KvQuantBase(Base):
    """Lloyd-Max levels of a block's vectors, or of a calibration file."""

    name: ClassVar[str] = "kvquant"
    keys_by_channel = True
    defaults: ClassVar[Mapping[str, Any]] = {"signposts": "vector", "calibration": ""}
    fit_uses = ("bits", "sparse_frac")

    def check(self, side: str, s: SideSettings, where: str) -> None:
        """Refuse more levels than short vectors can fill."""
        check_integer(f"{where}bits", s.bits, 1, 4)
        form = s.option("signposts")
        check_one_of(f"{where}base_options.signposts", form, ("vector", "shared"))

    def default_block(self, s: SideSettings) -> int:
        """Return 128: the levels of a channel are paid once a block."""
        return 128

    def layout(self, side: str) -> dict[str, Held]:
        """Return codes along tokens; levels or ranges of K belong to the block, of V to tokens."""
        rows = Held("scales", 2 if side == "v" else None)
        codes, posts = Held("codes", 2 if side == "v" else 3), Held("scales")
        return {"codes": codes, "levels": rows, "scale": rows, "zero": rows, "signposts": posts}

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return 4·rows·ceil(cols·b/32) a head; 2·2^b a row, or 4 a row and 2·2^b a head."""
        rows, cols = (head_dim, tokens) if side == "k" else (tokens, head_dim)
        vector, posts = self._form(s)
        scales = rows * 2 * 2**s.bits if vector else 4 * rows + posts * 2 * 2**s.bits
        return {"codes": heads * 4 * rows * packed_words(cols, s.bits), "scales": heads * scales}

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Store levels or ranges, then codes of what was stored; outliers get code 0."""
        from gear.nuq import lloyd_max, look_up, nearest, store_unit, stored_levels
        from gear.pack import pack
        from gear.precision import values_need_fp32, zero_needs_fp32
        from gear.quantize import min_max

        vector, posts = self._form(s)
        if vector:
            step, _ = min_max(rows, rows.x.shape[-1], s.bits, False)
            levels = lloyd_max(rows, rows.x, s.bits, shared=False)
            store.add("levels", levels, zero_needs_fp32(levels, step))
        else:
            unit = store_unit(store, rows, s.bits)
            if posts:
                fitted = lloyd_max(rows, unit, s.bits, shared=True)[:, :, 0]
                store.add("signposts", fitted, values_need_fp32(fitted))
        levels = stored_levels(store.arrays, s.option("calibration"), s.bits)
        codes = rows.filled(nearest(rows.x, levels), 0)
        store.add("codes", pack(codes, s.bits), None)
        return look_up(codes, levels)

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return the level of each code."""
        from gear.nuq import look_up, stored_levels
        from gear.pack import unpack

        cols = tokens if side == "k" else head_dim
        levels = stored_levels(arrays, s.option("calibration"), s.bits)
        return look_up(unpack(arrays["codes"], s.bits, cols), levels)

    def cut(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, start: int, stop: int
    ) -> dict[str, mx.array]:
        """Return some of the words of every channel of K, or rows of a token each."""
        if side == "v":
            return super().cut(arrays, side, s, start, stop)
        from gear.pack import cut_packed

        return {**arrays, "codes": cut_packed(arrays["codes"], s.bits, start, stop)}

    def fit(self, side: str, x: mx.array, s: SideSettings, seed: int) -> dict[str, mx.array]:
        """Return the signposts of all heads; nothing is drawn."""
        from gear.nuq import signposts

        rows = x.swapaxes(-1, -2) if side == "k" else x
        return {"signposts": signposts(rows, s.bits, s.sparse_frac)}

    def _form(self, s: SideSettings) -> tuple[bool, bool]:
        """Say whether every vector has levels of its own, and whether the file has none."""
        fitted = not s.option("calibration")
        return fitted and s.option("signposts") == "vector", fitted


@dataclass
class KvQuant(GearFamily):
    """Non-uniform levels and 1% outliers."""

    bits: int = 3
    """Bits per code, 1..4."""
    n_sink: int = 1
    """First tokens kept exact."""
    sparse_frac: float = 0.01
    """Share of each vector kept apart."""
    signposts: str = "vector"
    """Levels of each vector, or shared by the vectors of a head and block."""
    calibration: str = ""
    """A safetensors file of shared levels, or auto; "" = fitted on each block."""

    name: ClassVar[str] = "kvquant"
    switches: ClassVar[dict[str, Any]] = {
        "base": "kvquant", "rank": 0, "rank_decode": 0, "outlier_stage": "pre_quant",
        "clip": False, "scale_bits": 16,
    }  # fmt: skip
