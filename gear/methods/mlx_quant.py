"""mlx_quant: mlx-lm's QuantizedKVCache, affine per token along channels (`mx.quantize`).

Stores codes and 16-bit scales and biases from the first token on (its own default leaves the first
5000 tokens exact, which would measure nothing here). Attention runs on the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gear.config import SettingError


@dataclass
class MlxQuant:
    """Options of mlx-lm's quantized cache."""

    bits: int = 4
    """Bits per code: 2, 3, 4 or 8 (mlx-lm's buffers do not fit 5 and 6 at head_dim 128)."""
    group_size: int = 64
    """Channels that share a scale: 32, 64 or 128."""

    name: ClassVar[str] = "mlx_quant"
    uses_gear: ClassVar[bool] = False
    compresses: ClassVar[bool] = True
    accounting_only: ClassVar[bool] = False

    def plan(self, n_layers: int) -> list[dict[str, Any]]:
        """Validate, and return the options, which are the same in every layer."""
        for name, value, allowed in (
            ("bits", self.bits, (2, 3, 4, 8)),
            ("group_size", self.group_size, (32, 64, 128)),
        ):
            if value not in allowed:
                raise SettingError(f"cache.{name}", value, "one of " + ", ".join(map(str, allowed)))
        return [{"bits": self.bits, "group_size": self.group_size}]

    def check_shape(self, n_layers: int, kv_heads: int, head_dim_k: int, head_dim_v: int) -> None:
        """Refuse a model whose channels do not fill whole groups."""
        for head_dim in (head_dim_k, head_dim_v):
            if head_dim % self.group_size:
                raise SettingError(
                    "cache.group_size", self.group_size,
                    f"a divisor of the model's head_dim {head_dim}", "Set cache.group_size=32.",
                )  # fmt: skip

    def block_tokens(self) -> int | None:
        """Return None: every token is quantized as it comes."""
        return None

    def recent_tokens(self) -> int:
        """Return 0."""
        return 0

    def make_cache(self, layer: int, n_layers: int) -> Any:
        """Return a fresh quantized cache."""
        from gear.mlx_quantized import MlxQuantizedCache

        return MlxQuantizedCache(group_size=self.group_size, bits=self.bits)
