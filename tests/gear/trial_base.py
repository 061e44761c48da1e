"""A base that is like none of ours, to hold what a base may be: one file, one line in the table.

Sign and magnitude: a bit for each entry by token, and a magnitude of each channel of the block. So
it has an array of its own shape per block, options, tensors from a file, and needs of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx

from gear.bases import Base, Held
from gear.bytes import packed_words
from gear.calibration import tensors
from gear.checks import SettingError, check_one_of
from gear.config import SideSettings
from gear.outliers import Rows
from gear.pack import pack, unpack
from gear.precision import Store, values_need_fp32


class Trial(Base):
    """x ~ sign(x) · mean |x| of its channel, times ``factor``."""

    name: ClassVar[str] = "trial"
    defaults: ClassVar[Mapping[str, Any]] = {"factor": 1.0, "parts": (1, 2), "calibration": ""}

    def check(self, side: str, s: SideSettings, where: str) -> None:
        check_one_of(f"{where}bits", s.bits, (1,))

    def check_shape(self, side: str, s: SideSettings, head_dim: int, where: str) -> None:
        if head_dim % 8:
            raise SettingError(f"{where}base", s.base, f"another one for head_dim {head_dim}")

    def default_block(self, s: SideSettings) -> int:
        return 48

    def least_block(self, s: SideSettings) -> int:
        return 32

    def unit(self, side: str, s: SideSettings) -> int:
        return 16

    def layout(self, side: str) -> dict[str, Held]:
        return {"codes": Held("codes", joined=2), "size": Held("scales")}

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        codes = heads * tokens * 4 * packed_words(head_dim, 1)
        return {"codes": codes, "scales": heads * 2 * picked.get("channels", head_dim)}

    def picked(self, arrays: Mapping[str, mx.array]) -> dict[str, int]:
        return {"channels": arrays["size"].shape[-1]}

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        size = rows.filled(mx.abs(rows.x), 0).mean(axis=2)
        seen = store.add("size", size, values_need_fp32(size))
        codes = (rows.x >= 0).astype(mx.uint8)
        store.add("codes", pack(codes, 1), None)
        return self._base(codes, seen[:, :, None], s)

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        codes = unpack(arrays["codes"], 1, head_dim)
        return self._base(codes, arrays["size"].astype(mx.float32)[:, :, :, None], s)

    def _base(self, codes: mx.array, size: mx.array, s: SideSettings) -> mx.array:
        scale = mx.array(s.option("factor"))
        if s.option("calibration"):
            scale = scale * tensors(s.option("calibration"))["gain"]
        return (codes.astype(mx.float32) * 2 - 1) * size * scale
