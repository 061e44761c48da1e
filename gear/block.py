"""What is stored of compressed K or V, and how it is read back: base + L·R + S.

A `Block` holds ``count`` equal blocks of one side side by side: of the base's arrays some joined
along tokens (`Base.layout`), all others stacked on a block axis (axis 2). Layout of the grid bases:
K codes [batch, heads, head_dim, words] (transposed, groups along tokens), V codes [batch, heads,
tokens, words]; Lᵀ [batch, heads, count, rank, tokens], R [..., rank, head_dim]; outliers [batch,
heads, count, vectors, 2k], in port order [batch, heads, count, nnz]. Read-back arithmetic is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from gear.bases import Base, load_base
from gear.bytes import TERMS
from gear.coarse import off_grid
from gear.config import SideSettings
from gear.pack import unpack
from gear.precision import cast

_TERM_OF = {
    "left": "lowrank", "right": "lowrank", "left_grid": "lowrank", "right_grid": "lowrank",
    "outlier_index": "outliers", "outlier_value": "outliers", "outlier_scale": "outliers",
}  # fmt: skip


def product(left: mx.array, right: mx.array, side: str) -> mx.array:
    """Return L·R in rows (transposed for K) from Lᵀ [..., r, tokens] and R [..., r, head_dim]."""
    if side == "k":
        return right.swapaxes(-1, -2) @ left
    return left.swapaxes(-1, -2) @ right


@dataclass
class Block:
    """``count`` compressed blocks of ``tokens`` tokens each, of one side.

    ``arrays`` holds what is stored; ``rank`` is the low-rank term's real rank (0 = none). With
    ``spare`` an outlier's place may be one behind the last, which stands for none (see tiles.py).
    """

    side: str
    settings: SideSettings
    tokens: int
    head_dim: int
    rank: int
    count: int
    arrays: dict[str, mx.array]
    spare: bool = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """All fields but the arrays, in their order."""
        return (self.side, self.settings, self.tokens, self.head_dim, self.rank, self.count,
                self.spare)  # fmt: skip

    @property
    def quantizer(self) -> Base:
        """The base these blocks were made with."""
        return load_base(self.settings.base)

    @property
    def packed(self) -> bool:
        """Whether codes, scale and zero lie as packed attention and the fused kernel read them."""
        return self.quantizer.packed

    @property
    def batch(self) -> int:
        """Batch rows."""
        return next(iter(self.arrays.values())).shape[0]

    @property
    def cut_unit(self) -> int | None:
        """Where a block may be cut, in tokens; None = nowhere."""
        return self.quantizer.cut_unit(self.side, self.settings)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays really held."""
        return sum(a.nbytes for a in self.arrays.values())

    def terms(self) -> dict[str, int]:
        """Return held bytes by term: codes, scales, lowrank, outliers."""
        layout = self.quantizer.layout(self.side)
        sizes: dict[str, int] = dict.fromkeys(TERMS, 0)
        for name, array in self.arrays.items():
            sizes[layout[name].term if name in layout else _TERM_OF[name]] += array.nbytes
        return sizes

    def _axis(self, name: str) -> int:
        """Return the axis along which blocks lie in array ``name``."""
        return self._joined(name) or 2

    def _joined(self, name: str) -> int | None:
        """Return the axis along which blocks are joined in array ``name``; None: a block axis."""
        layout = self.quantizer.layout(self.side)
        return layout[name].joined if name in layout else None

    def _forms(self) -> dict[str, Any]:
        """Return dtype and shape of one block's arrays."""
        forms = {}
        for name, array in self.arrays.items():
            shape, axis = [*array.shape], self._axis(name)
            shape[axis] //= self.count
            forms[name] = array.dtype, shape
        return forms

    def matches(self, other: Block) -> bool:
        """Say whether ``other`` is an equal kind of block, dtypes and shapes included."""
        mine, theirs = replace(self, count=1).kind, replace(other, count=1).kind
        return mine == theirs and self._forms() == other._forms()

    def joined(self, other: Block) -> Block:
        """Return this block followed by an equal kind of block."""
        arrays = {
            n: mx.concatenate([a, other.arrays[n]], axis=self._axis(n))
            for n, a in self.arrays.items()
        }
        return replace(self, count=self.count + other.count, arrays=arrays)

    def some(self, start: int, stop: int) -> Block:
        """Return blocks ``start`` to ``stop`` of these, as views."""
        if (start, stop) == (0, self.count):
            return self
        arrays = {}
        for name, array in self.arrays.items():
            axis = self._axis(name)
            each = array.shape[axis] // self.count
            span = [slice(None)] * array.ndim
            span[axis] = slice(start * each, stop * each)
            arrays[name] = array[tuple(span)]
        return replace(self, count=stop - start, arrays=arrays)

    def first(self, count: int) -> Block:
        """Return the first ``count`` of these blocks, as copies: what is dropped is freed."""
        part = self.some(0, count)
        return replace(part, arrays={n: mx.contiguous(a) for n, a in part.arrays.items()})

    def row(self, index: int) -> Block:
        """Return batch row ``index`` alone.

        A term that only another row needed in fp32 goes back to fp16, which loses nothing: each
        row was rounded for itself.
        """
        arrays = {}
        for name, array in self.arrays.items():
            one = mx.contiguous(array[index : index + 1])
            if one.dtype == mx.float32:
                narrow = one.astype(mx.float16)
                if mx.array_equal(narrow.astype(mx.float32), one).item():
                    one = narrow
            arrays[name] = one
        return replace(self, arrays=arrays)

    def _by_block(self, name: str) -> mx.array:
        """Return array ``name`` with its block axis: [batch, heads, count, ...]."""
        a, joined = self.arrays[name], self._joined(name)
        if joined is None:
            return a
        if joined == 3:
            return a.reshape(*a.shape[:3], self.count, -1).swapaxes(2, 3)
        each = a.shape[2] // self.count
        return a.reshape(*a.shape[:2], self.count, each, *a.shape[3:])

    def codes(self) -> mx.array:
        """Return the codes of a grid base, uint8 [batch, heads, count * tokens, head_dim]."""
        by_channel = self.side == "k" and self.quantizer.keys_by_channel
        cols = self.tokens if by_channel else self.head_dim
        codes = unpack(self._by_block("codes"), self.settings.bits, cols)
        codes = codes.swapaxes(-1, -2) if by_channel else codes
        return codes.reshape(*codes.shape[:2], -1, self.head_dim)

    def _merge(self, rows: mx.array) -> mx.array:
        """Turn rows [batch, heads, count, rows, cols] into [batch, heads, tokens, head_dim]."""
        x = rows.swapaxes(-1, -2) if self.side == "k" else rows
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def _factor(self, name: str, length: int) -> mx.array:
        """Return Lᵀ or R, rows of ``length``, as fp32 and off its grid if it has one."""
        arrays, bits = self.arrays, self.settings.factor_bits
        if bits < 16:
            arrays = {**arrays, name: unpack(arrays[name], bits, length)}
        return off_grid(arrays, name)

    def ranges(self) -> tuple[mx.array, mx.array]:
        """Return scale and zero in fp32, laid out beside the codes (blocks joined along tokens).

        Of `packed` blocks.
        """
        found = []
        for name in ("scale", "zero"):
            if f"{name}_grid" not in self.arrays:
                found.append(self.arrays[name].astype(mx.float32))
                continue
            stored = (name, f"{name}_grid")
            by_block = off_grid({n: self._by_block(n) for n in stored}, name)
            k = self.side == "k"
            found.append(by_block.swapaxes(2, 3).flatten(3) if k else by_block.flatten(2, 3))
        return found[0], found[1]

    def base(self) -> mx.array:
        """Return Quant_b(X) in fp32 rows [batch, heads, count, rows, cols], K transposed."""
        base = self.quantizer
        arrays = {n: self._by_block(n) for n in base.layout(self.side) if n in self.arrays}
        rows = base.read(arrays, self.side, self.settings, self.tokens, self.head_dim)
        across = self.side == "k" and not base.keys_by_channel
        return rows.swapaxes(-1, -2) if across else rows

    def low_rank(self) -> tuple[mx.array, mx.array] | None:
        """Return Lᵀ [batch, heads, count, r, tokens] and R [..., r, head_dim] in fp32, or None."""
        if "left" not in self.arrays:
            return None
        return self._factor("left", self.tokens), self._factor("right", self.head_dim)

    def outliers(self) -> tuple[mx.array, mx.array] | None:
        """Return places and fp32 values of S per vector (or per head, port order), or None."""
        if "outlier_value" not in self.arrays:
            return None
        values = self.arrays["outlier_value"].astype(mx.float32)
        if "outlier_scale" in self.arrays:
            values = values * self.arrays["outlier_scale"].astype(mx.float32)
        return self.arrays["outlier_index"].astype(mx.uint32), values

    def reconstruct(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """Return base + L·R + S as [batch, heads, count * tokens, head_dim] of ``dtype``."""
        rows = self.base()
        factors = self.low_rank()
        if factors is not None:
            rows = rows + product(*factors, self.side)
        sparse = self.outliers()
        if sparse is not None:
            index, values = sparse
            flat = index.ndim == 4  # port order: places in the head's [tokens, head_dim]
            shape = rows.shape
            if flat:
                rows = (rows.swapaxes(-1, -2) if self.side == "k" else rows).flatten(3)
            if self.spare:
                rows = mx.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, 1)])
            values = values + mx.take_along_axis(rows, index, axis=-1)
            rows = mx.put_along_axis(rows, index, values, axis=-1)
            rows = rows[..., :-1] if self.spare else rows
            if flat:
                rows = rows.reshape(*shape[:3], self.tokens, self.head_dim)
                return cast(rows.reshape(*shape[:2], -1, self.head_dim), dtype)
        return cast(self._merge(rows), dtype)
