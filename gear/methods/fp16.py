"""fp16: the exact cache of mlx-lm, the baseline of every table.

Stores K and V as they are. Its bytes are counted at 2 an element whatever the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass
class Fp16:
    """The exact cache; no options."""

    name: ClassVar[str] = "fp16"
    uses_gear: ClassVar[bool] = False
    compresses: ClassVar[bool] = False
    accounting_only: ClassVar[bool] = False

    def plan(self, n_layers: int) -> list[dict[str, Any]]:
        """Return nothing: there is nothing to resolve."""
        return []

    def check_shape(self, n_layers: int, kv_heads: int, head_dim_k: int, head_dim_v: int) -> None:
        """Accept every model."""

    def block_tokens(self) -> int | None:
        """Return None: there are no blocks."""
        return None

    def recent_tokens(self) -> int:
        """Return 0."""
        return 0

    def make_cache(self, layer: int, n_layers: int) -> Any:
        """Return a fresh exact cache."""
        from gear.exact import ExactCache

        return ExactCache()
