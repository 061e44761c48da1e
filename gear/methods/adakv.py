"""adakv: heads share a layer's budget by the attention of the prompt's end (arXiv:2407.11550).

    score(j) = max over j ± 3 of the mean, over the last ``window`` queries and the heads of a KV
               head, of softmax(scale · q·Kᵀ)[j]

A row keeps ``kv_heads · budget`` tokens of a layer: the last ``window`` tokens of every head, then
each head's floor(0.2 · (budget - window)) best, then the best of all heads together. So a head that
attends widely keeps more than one that looks at few tokens. Stored: see gear/methods/eviction.py.

Scores are SnapKV's, pooled by a maximum over ``pool`` places (its code has both mean and maximum,
5 and 7). The paper's code first counts what each head has among the best of all and adds the floor
to a scaled count; here the floor is taken first and the rest are the best that remain, which also
sums to the budget. Attention sinks (logits without a token) and masks but the causal one are left
out of the scores. Decoded tokens are kept exact. No calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gear.checks import SettingError, check_fraction, check_integer
from gear.methods.eviction import Eviction

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np


def window_attention(keys: mx.array, queries: mx.array) -> mx.array:
    """Return the mean attention [batch, kv_heads, tokens] that the last n queries pay to keys.

    ``keys`` [batch, kv_heads, tokens, head_dim]; ``queries`` [batch, kv_heads, group, n, head_dim]
    are those of the last n tokens, times the scale.
    """
    import mlx.core as mx

    n, tokens = queries.shape[3], keys.shape[2]
    logits = queries @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2)
    seen = mx.arange(tokens) <= mx.arange(tokens - n, tokens)[:, None]
    return mx.softmax(mx.where(seen, logits, -mx.inf), axis=-1).mean(axis=(2, 3))


def pooled(scores: np.ndarray, pool: int) -> np.ndarray:
    """Return the maximum over ``pool`` places around each; beyond the ends there is nothing."""
    import numpy as np

    side = pool // 2
    padded = np.pad(scores, [(0, 0), (0, 0), (side, side)], constant_values=-np.inf)
    return np.lib.stride_tricks.sliding_window_view(padded, pool, axis=-1).max(axis=-1)


@dataclass
class AdaKV(Eviction):
    """A budget that heads share, by SnapKV's scores."""

    window: int = 32
    """Last tokens, which judge the others and are always kept."""
    pool: int = 7
    """Places whose maximum is a token's score; odd, 1 = no pooling."""
    floor: float = 0.2
    """Share of an even budget that every head gets in any case."""

    name: ClassVar[str] = "adakv"

    @property
    def query_window(self) -> int:
        """Return ``window``."""
        return self.window

    def check(self) -> None:
        """Refuse a window that fills the budget, and pools without a middle."""
        super().check()
        self.check_window("window", self.window)
        check_fraction("cache.floor", self.floor)
        check_integer("cache.pool", self.pool, 1)
        if self.pool % 2 == 0:
            raise SettingError("cache.pool", self.pool, "odd, so that it has a middle")

    def choose(
        self, keys: mx.array, queries: mx.array | None, layer: int, budget: int
    ) -> list[list[np.ndarray]]:
        """Return the window's places and the best others.

        A budget below the window (``budget_fraction`` of a short prompt) keeps the last tokens.
        """
        import numpy as np

        from gear.choice import shared

        if queries is None:
            raise ValueError("adakv: chooses by queries; hand over the prompt's last ones.")
        tokens, window = keys.shape[2], min(self.window, budget)
        attention = np.array(window_attention(keys, queries))[..., : tokens - window]
        scores = pooled(attention, self.pool)
        last = np.arange(tokens - window, tokens)
        chosen = shared(scores, budget - window, self.floor)
        return [[np.concatenate([places, last]) for places in row] for row in chosen]
