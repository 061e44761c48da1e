"""What the fused decode kernel is compiled for, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

TILE = 512  # tokens a thread group looks at together
ROWS = 128  # rows of the low-rank terms of one tile
_OUTLIER_LANES = 16  # lanes that read the outliers of one channel of K
_MATRIX_HEADS = 4  # of a thread group: two columns each of the eight of a matrix product
_WORD_HEADS = 5  # a thread holds 32 / bits sums a head; 64 or 80 leave registers for the rest
_UNITS = (64, 32)  # places of a packed line that one matrix product may take
_STAGED_BYTES = 20 * 1024  # for codes on their way to the matrix units, at least
_SHARED_BYTES = {"metal": 32 * 1024, "cuda": 48 * 1024}


@dataclass(frozen=True, eq=False)  # looked up by identity at every call
class Variant:
    """What the kernel is compiled for. ``dtypes`` are those of the queries and the inputs.

    ``group`` is the query heads a KV head; ``k_along`` and ``v_along`` are the entries that share
    a scale, 0 where that is a block's length.
    """

    kind: str
    group: int
    head_dim: int
    k_bits: int
    v_bits: int
    k_along: int
    v_along: int
    dtypes: tuple[mx.Dtype, ...]

    @cached_property
    def parts(self) -> int:
        """Return the thread groups that share a KV head's query heads."""
        most = _MATRIX_HEADS if self.kind == "cuda" else _WORD_HEADS
        fits = [n for n in (1, 2) if self.group % n == 0 and self.group // n <= most]
        return fits[0] if fits else 1

    @cached_property
    def units(self) -> tuple[int, int] | None:
        """Return the places of K and V a matrix product takes; None where only words will do."""
        fp16 = {self.dtypes[2], self.dtypes[9]} == {mx.float16}  # a scale times 1 is fp16 then
        if self.kind != "cuda" or self.parts * _MATRIX_HEADS < self.group or not fp16:
            return None
        k = next((u for u in _UNITS if self.k_along and self.k_along % u == 0), 0)
        v = next((u for u in _UNITS if self.v_along % u == 0 and self.head_dim % u == 0), 0)
        return (k, v) if k and v and self.head_dim % 16 == 0 else None

    @property
    def form(self) -> str:
        """Return which form of the kernel runs: "matrix" or "words"."""
        return "words" if self.units is None else "matrix"

    @cached_property
    def constants(self) -> dict[str, int] | None:
        """Return the constants of the text; None where shared memory is too small."""
        heads, d = self.group // self.parts, self.head_dim
        staged = 0 if self.units is None else _STAGED_BYTES // (4 * heads)
        for simds in (4, 2, 1):
            if d % simds or (self.units is None and d * self.v_bits // 32 > 32 * simds):
                continue
            for slots in (4 * simds, 2 * simds, simds):
                scratch = max(simds * TILE, TILE + slots * d, TILE + staged)
                used = 4 * d + 4 * heads * (2 * d + ROWS + simds + scratch)
                if used > _SHARED_BYTES[self.kind]:
                    continue
                found = {
                    "K_BITS": self.k_bits, "V_BITS": self.v_bits, "D": d, "G": heads,
                    "TILE": TILE, "ROWS": ROWS, "WIDTH": _OUTLIER_LANES, "SIMDS": simds,
                    "SLOTS": slots, "SCRATCH": scratch,
                }  # fmt: skip
                return found | self._form_constants(4 * heads * (scratch - TILE), simds)
        return None

    def _form_constants(self, staged: int, simds: int) -> dict[str, int]:
        """Return what one form needs besides, with ``staged`` bytes for codes and scales."""
        if self.units is None:
            return {"K_SPREAD": 32 // self.k_bits, "V_SPREAD": 32 // self.v_bits}
        found = {"K_ALONG": self.k_along, "V_ALONG": self.v_along}
        rows = {"K": (TILE, self.head_dim), "V": (self.head_dim, TILE)}
        for side, unit, bits in zip("KV", self.units, (self.k_bits, self.v_bits), strict=True):
            row, most = rows[side]
            pitch = row * bits // 8 + 16  # rows then differ in their banks
            count = staged // (pitch + 4 * -(-row // found[f"{side}_ALONG"]))
            found |= {
                f"{side}_UNIT": unit, f"{side}_SPREAD": unit // 8, f"{side}_PITCH": pitch,
                f"{side}_CHUNK": unit * bits // 64, f"{side}_PIECE": min(16, unit * bits // 8),
                f"{side}_ROWS": min(count // 16 * 16, most),
            }  # fmt: skip
        return found | {"K_UNITS": TILE // simds // found["K_UNIT"]}
