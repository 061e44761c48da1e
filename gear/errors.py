"""Errors of the cache that a caller may want to catch by name."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


class NonFiniteError(ValueError):
    """NaN or inf in K or V. Attributes: side ("k" or "v"), layer, head, count."""

    def __init__(self, side: str, layer: int, head: int, count: int) -> None:
        self.side, self.layer, self.head, self.count = side, layer, head, count
        where = f" of layer {layer}" if layer >= 0 else ""
        if not count:
            super().__init__(
                f"{side.upper()}{where} spans more than fp32 can hold: must be within 1e38. If a "
                "model made it, it overflowed before the cache: compute in float32."
            )
            return
        super().__init__(
            f"{side.upper()}{where} holds {count} NaN or inf (first in head {head}): must be "
            "finite. If a model made it, it overflowed before the cache: compute in float32."
        )

    @classmethod
    def found(cls, x: mx.array, side: str, layer: int) -> NonFiniteError:
        """Describe the non-finite entries of x [batch, heads, tokens, head_dim]."""
        per_head = (~mx.isfinite(x)).sum(axis=(0, 2, 3))
        counts = np.array(per_head)
        return cls(side, layer, int(np.argmax(counts > 0)), int(counts.sum()))
