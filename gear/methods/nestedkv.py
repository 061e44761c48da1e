"""nestedkv: keep the keys that surprise three running means, once after the prefill (2605.26678).

With k^ = k / ‖k‖ and three means of k^ over the prompt: of all tokens (stable), of the token's
block of clip(N/32, 128, 256) (episodic), of its last ``recent`` tokens, itself included (current),

    a_m(i) = -cos(k^_i, mean_m(i)), each scaled to [0, 1] over a head's tokens
    w = softmax(log(0.4, 0.4, 0.2) + beta · spread_m),  spread: mean of the top 10% - of the bottom
    s(i) = std of the three a_m(i), scaled to [0, 1] in the head, minus its mean
    score = (1 - g) · Σ w_m a_m + g · max a_m,  g = sigmoid(kappa · (s - tau))

The first ``sinks`` tokens are always kept. Heads share a layer's budget as in adakv.py: floor 0.2.
Only keys are looked at; no query is needed. Stored: see gear/methods/eviction.py. No calibration.

Formulas and defaults are those of the paper's section 2 and appendix A as public notes on it quote
them (a preprint; we had no copy). Ours: the top and bottom 10% have one token at least, a constant
scale is all 0, and ties go to the earlier token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gear.checks import SettingError, check_fraction, check_integer
from gear.methods.eviction import Eviction

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

_PRIOR = (0.4, 0.4, 0.2)
_SHARE = 10  # one token in so many is at the top, or at the bottom


def _unit(x: mx.array) -> mx.array:
    """Return vectors of length 1; one of zeros stays."""
    import mlx.core as mx

    length = mx.linalg.norm(x, axis=-1, keepdims=True)
    return mx.where(length == 0, 0, x / mx.where(length == 0, 1, length))


def _scaled(x: mx.array) -> mx.array:
    """Return ``x`` scaled to [0, 1] along its last axis, zeros where it is constant."""
    import mlx.core as mx

    low = x.min(axis=-1, keepdims=True)
    span = x.max(axis=-1, keepdims=True) - low
    return mx.where(span == 0, 0, (x - low) / mx.where(span == 0, 1, span))


def _means(k: mx.array, recent: int) -> list[mx.array]:
    """Return the stable, episodic and current means of each token [..., tokens, head_dim]."""
    import mlx.core as mx

    tokens = k.shape[2]
    stable = mx.broadcast_to(k.mean(axis=2, keepdims=True), k.shape)
    # sums of what is left of the mean stay small, so differences of them keep their digits
    sums = mx.pad(mx.cumsum(k - stable, axis=2), [(0, 0), (0, 0), (1, 0), (0, 0)])
    block, place = min(max(tokens // 32, 128), 256), mx.arange(tokens)
    first = place // block * block
    episode = first, mx.minimum(first + block, tokens)
    current = mx.maximum(place + 1 - recent, 0), place + 1
    windows = [
        (sums[:, :, stop] - sums[:, :, start]) / (stop - start)[:, None] + stable
        for start, stop in (episode, current)
    ]
    return [stable, *windows]


@dataclass
class NestedKV(Eviction):
    """Keys by their anomaly at three scales."""

    recent: int = 64
    """Tokens of the current mean."""
    sinks: int = 4
    """First tokens, always kept."""
    floor: float = 0.2
    """Share of an even budget that every head gets in any case."""
    beta: float = 3.0
    """How much a scale that tells tokens apart outweighs the others."""
    tau: float = 0.6
    """Surprise from which the largest anomaly counts in place of the mix."""
    kappa: float = 10.0
    """How sharply it does."""

    name: ClassVar[str] = "nestedkv"

    def check(self) -> None:
        """Refuse sinks that fill the budget, and constants that are no finite numbers >= 0."""
        super().check()
        self.check_window("sinks", self.sinks, 0)
        check_integer("cache.recent", self.recent, 1)
        check_fraction("cache.floor", self.floor)
        for field in ("beta", "tau", "kappa"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise SettingError(f"cache.{field}", value, "a finite number of at least 0")

    def scores(self, keys: mx.array) -> mx.array:
        """Return the score of each token [batch, kv_heads, tokens]."""
        import mlx.core as mx

        k = _unit(keys.astype(mx.float32))
        means = _means(k, self.recent)
        a = mx.stack([_scaled(-(k * _unit(mean)).sum(axis=-1)) for mean in means])
        order, n = mx.sort(a, axis=-1), max(a.shape[-1] // _SHARE, 1)
        spread = order[..., -n:].mean(axis=-1) - order[..., :n].mean(axis=-1)
        prior = mx.log(mx.array(_PRIOR)).reshape(-1, *[1] * (spread.ndim - 1))
        weight = mx.softmax(prior + self.beta * spread, axis=0)[..., None]
        surprise = _scaled(mx.std(a, axis=0))
        surprise = surprise - surprise.mean(axis=-1, keepdims=True)
        gate = mx.sigmoid(self.kappa * (surprise - self.tau))
        return (1 - gate) * (weight * a).sum(axis=0) + gate * a.max(axis=0)

    def choose(
        self, keys: mx.array, queries: mx.array | None, layer: int, budget: int
    ) -> list[list[np.ndarray]]:
        """Return the first places and the best of all heads."""
        import numpy as np

        from gear.choice import shared

        scores = np.array(self.scores(keys))
        scores[..., : self.sinks] = np.inf
        return shared(scores, budget, self.floor)
