"""kvquant: non-uniform levels per channel of K and token of V, outliers apart (arXiv:2401.18079).

    x ~ level[code], 2^b levels by Lloyd-Max (nuq.py); 1% of each vector in S; first token exact

A vector is a head's channel over the block (K) or a token of a head (V). Outliers are GEAR's S: the
ends of each vector, out of the fit. n_b = 128 is the least at which K has some at 1%; V has from
head_dim 100 on. Stored: packed codes, and by ``signposts``
- ``vector`` (as the VeloxQuant-MLX port): 2^b levels a vector, fitted on the block;
- ``shared`` (nearer the paper, far fewer bytes): scale and zero a vector, which bring it to [0, 1],
  and 2^b levels a head and block; with ``calibration``, a file of ``LAYER.SIDE.signposts`` [2^b] or
  [heads, 2^b] ascending in [0, 1], the file's levels, which take no bytes (the paper's way).
The paper fits one datatype a layer, Fisher-weighted, on calibration text, takes K's ranges from
there too, has V's outliers of all heads together, and quantizes K before RoPE; here it is after.
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
        from gear.coarse import store_ranges
        from gear.nuq import lloyd_max, look_up, nearest, unit
        from gear.pack import pack
        from gear.precision import values_need_fp32, zero_needs_fp32
        from gear.quantize import min_max

        step, low = min_max(rows, rows.x.shape[-1], s.bits, False)
        vector, posts = self._form(s)
        if vector:
            levels = lloyd_max(rows, rows.x, s.bits, shared=False)
            store.add("levels", levels, zero_needs_fp32(levels, step))
        else:
            scale, zero = store_ranges(store, step * (2**s.bits - 1), low, 16)
            if posts:
                fitted = lloyd_max(rows, unit(rows.x, scale, zero), s.bits, shared=True)[:, :, 0]
                store.add("signposts", fitted, values_need_fp32(fitted))
        levels = self._levels(store.arrays, s)
        codes = rows.filled(nearest(rows.x, levels), 0)
        store.add("codes", pack(codes, s.bits), None)
        return look_up(codes, levels)

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return the level of each code."""
        from gear.nuq import look_up
        from gear.pack import unpack

        cols = tokens if side == "k" else head_dim
        return look_up(unpack(arrays["codes"], s.bits, cols), self._levels(arrays, s))

    def cut(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, start: int, stop: int
    ) -> dict[str, mx.array]:
        """Return some of the words of every channel of K, or rows of a token each."""
        if side == "v":
            return super().cut(arrays, side, s, start, stop)
        from gear.pack import cut_packed

        return {**arrays, "codes": cut_packed(arrays["codes"], s.bits, start, stop)}

    def _form(self, s: SideSettings) -> tuple[bool, bool]:
        """Say whether every vector has levels of its own, and whether the file has none."""
        fitted = not s.option("calibration")
        return fitted and s.option("signposts") == "vector", fitted

    def _levels(self, arrays: Mapping[str, mx.array], s: SideSettings) -> mx.array:
        """Return fp32 levels [..., rows, 2^b] of what is stored."""
        from gear.calibration import tensors
        from gear.coarse import off_grid as fp32

        if "levels" in arrays:
            return fp32(arrays, "levels")
        scale, zero = fp32(arrays, "scale"), fp32(arrays, "zero")
        if "signposts" in arrays:
            return fp32(arrays, "signposts")[..., None, :] * scale + zero
        posts = fp32(tensors(s.option("calibration")), "signposts")
        return posts.reshape(-1, *[1] * (scale.ndim - 3), 2**s.bits) * scale + zero


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
    """A safetensors file of shared levels; "" = fitted on each block."""

    name: ClassVar[str] = "kvquant"
    switches: ClassVar[dict[str, Any]] = {
        "base": "kvquant", "rank": 0, "rank_decode": 0, "outlier_stage": "pre_quant",
        "clip": False, "scale_bits": 16,
    }  # fmt: skip
