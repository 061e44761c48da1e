"""Bases of uniform codes: code · scale + zero, with one scale and zero a group of a row.

They differ in what a row of K is (a channel or a token), in what a group is, and in how scale and
zero are chosen (quantize.py). Importing this loads no MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from gear.bases import Base, Held
from gear.bytes import packed_words
from gear.checks import SettingError, check_one_of

if TYPE_CHECKING:
    import mlx.core as mx

    from gear.config import SideSettings
    from gear.outliers import Rows
    from gear.precision import Store

_GRIDS = {"scale_grid": Held("scales"), "zero_grid": Held("scales")}
_LAYOUT = {
    axis: {
        "codes": Held("codes", axis), "scale": Held("scales", axis), "zero": Held("scales", axis),
        **_GRIDS,
    }
    for axis in (2, 3)
}  # fmt: skip
"""By the axis along which tokens lie."""


class Grid(Base):
    """Min/max codes in groups of ``group_size`` entries of a row.

    Stored: ``codes`` packed uint32 [batch, heads, rows, words], ``scale`` and ``zero`` [batch,
    heads, rows, groups], at scale_bits=8 uint8 with a grid each.
    """

    takes = frozenset({"clip", "scale_bits"})

    def default_block(self, s: SideSettings) -> int:
        """Return max(64, group_size)."""
        return max(64, s.group_size)

    def unit(self, side: str, s: SideSettings) -> int:
        """Return the tokens of a group."""
        return self._along(s) if self._by_channel(side) and self._along(s) else 1

    def layout(self, side: str) -> dict[str, Held]:
        """Return codes, scales and zeros, joined along tokens, and the grids of 8-bit ones."""
        return _LAYOUT[3 if self._by_channel(side) else 2]

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return 4·rows·ceil(cols·b/32) a head, and 4 (at scale_bits=8: 2) bytes a group."""
        rows, cols = (head_dim, tokens) if self._by_channel(side) else (tokens, head_dim)
        along = self._along(s)
        families = self._scale_heads(side, heads) * (-(-cols // along) if along else 1)
        return {
            "codes": heads * 4 * rows * packed_words(cols, s.bits),
            "scales": families * (4 * rows if s.scale_bits == 16 else 2 * rows + 8),
        }

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Store codes of the stored scale and zero; outliers get code 0."""
        from gear.coarse import store_ranges
        from gear.pack import pack
        from gear.quantize import decode, encode

        scale, zero = store_ranges(store, *self._ranges(rows, s), s.scale_bits)
        along = self._along(s)
        codes = rows.filled(encode(rows.x, scale, zero, s.bits, along), 0)
        store.add("codes", pack(codes, s.bits), None)
        return decode(codes, scale, zero, along)

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return code · scale + zero."""
        from gear.coarse import off_grid
        from gear.pack import unpack
        from gear.quantize import decode

        codes = unpack(arrays["codes"], s.bits, tokens if self._by_channel(side) else head_dim)
        return decode(codes, off_grid(arrays, "scale"), off_grid(arrays, "zero"), self._along(s))

    def cut_unit(self, side: str, s: SideSettings) -> int | None:
        """Return the tokens of a group."""
        return self.unit(side, s)

    def cut(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, start: int, stop: int
    ) -> dict[str, mx.array]:
        """Return some of the words and groups of every channel of K, or rows of a token each."""
        if not self._by_channel(side):
            return super().cut(arrays, side, s, start, stop)
        from gear.pack import cut_packed

        found = {**arrays, "codes": cut_packed(arrays["codes"], s.bits, start, stop)}
        if group := self._along(s):
            groups = slice(start // group, -(-stop // group))
            for name in arrays.keys() - {"codes"}:
                grid = name.endswith("_grid")
                found[name] = arrays[name][..., groups, :] if grid else arrays[name][..., groups]
        return found

    def _by_channel(self, side: str) -> bool:
        """Say whether a row is a channel: K of some bases."""
        return side == "k" and self.keys_by_channel

    def _along(self, s: SideSettings) -> int:
        """Return how many entries of a row share a scale; 0 = all of it."""
        return s.group_size

    def _scale_heads(self, side: str, heads: int) -> int:
        """Return how many heads have scales of their own."""
        return heads

    def _ranges(self, rows: Rows, s: SideSettings) -> tuple[mx.array, mx.array]:
        """Return scale and zero [batch, heads, rows, groups]."""
        from gear.quantize import min_max

        return min_max(rows, s.group_size, s.bits, s.clip)


class Grouped(Grid):
    """KIVI: K in groups of tokens per channel, V in groups of channels per token."""

    name: ClassVar[str] = "grouped"
    keys_by_channel = True
    packed = True


class Vector(Grid):
    """KCVT: K one group per channel, V one group per token over the channels of all heads."""

    name: ClassVar[str] = "vector"
    keys_by_channel = True
    packed = True

    def default_block(self, s: SideSettings) -> int:
        """Return 20, as the GEAR paper."""
        return 20

    def _along(self, s: SideSettings) -> int:
        return 0

    def _scale_heads(self, side: str, heads: int) -> int:
        return heads if side == "k" else 1

    def _ranges(self, rows: Rows, s: SideSettings) -> tuple[mx.array, mx.array]:
        import mlx.core as mx

        from gear.outliers import Rows
        from gear.quantize import min_max

        x, places = rows.x, rows.places
        if rows.side == "v":
            batch, heads, n_rows, cols = x.shape
            x = x.swapaxes(1, 2).reshape(batch, 1, n_rows, heads * cols)
            if places is not None:
                first = mx.arange(0, heads * cols, cols, dtype=mx.uint32)[:, None, None]
                places = (places + first).swapaxes(1, 2).reshape(batch, 1, n_rows, -1)
        return min_max(Rows(x, rows.side, places), x.shape[-1], s.bits, s.clip)


class AffineMlx(Grid):
    """The groups of `Grouped` on the grid of `mx.quantize`, which always represents 0."""

    name: ClassVar[str] = "affine_mlx"
    keys_by_channel = True
    packed = True

    def check(self, side: str, s: SideSettings, where: str) -> None:
        """Refuse what `mx.quantize` does not have."""
        check_one_of(f"{where}group_size", s.group_size, (32, 64, 128))
        check_one_of(f"{where}bits", s.bits, (2, 3, 4, 5, 6, 8))
        if s.clip or s.scale_bits != 16:
            raise SettingError(
                f"{where}base", s.base, "grouped or vector with clip or scale_bits=8",
                "mx.quantize chooses its own range and stores 16-bit scales.",
            )  # fmt: skip

    def check_shape(self, side: str, s: SideSettings, head_dim: int, where: str) -> None:
        """Refuse V whose channels do not fill whole groups."""
        if side == "v" and head_dim % s.group_size:
            raise SettingError(
                f"{where}group_size", s.group_size, f"a divisor of head_dim {head_dim}",
                "Or use base=grouped, which allows a short last group.",
            )  # fmt: skip

    def _ranges(self, rows: Rows, s: SideSettings) -> tuple[mx.array, mx.array]:
        from gear.quantize import affine_mlx

        return affine_mlx(rows, s.group_size, s.bits)
