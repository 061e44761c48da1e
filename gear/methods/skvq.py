"""skvq: channels in order of their range, clipped groups per token (arXiv:2405.06219).

    order = channels of a head by max - min over the block;  groups of group_size channels in order;
    in each: scale = a·(max - min) / (2^b - 1) about the middle, a in {1, .95, … .6} by least error

K and V alike; the first 5 and the newest 128 tokens stay exact. Stored: packed codes, scale and
zero of every group, and the order of each head and block (a byte a channel).

The paper finds order (k-means of channel statistics, folded into the projections' weights) and a
on calibration text, once a model; here both are the block's own, so the order is stored. It keeps
scales in 8-bit floats: ours are fp16 (gear.scale_bits=8 gives 8-bit ones on a grid). Its window
slides a token at a time; ours leaves by blocks of n_b. No 1.5-bit values. No calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from gear.bases import Held
from gear.grids import Grid
from gear.methods.family import GearFamily

if TYPE_CHECKING:
    import mlx.core as mx

    from gear.config import SideSettings
    from gear.outliers import Rows
    from gear.precision import Store


class SkvqBase(Grid):
    """`Grid` by token, on channels in the order of their range, its ranges clipped."""

    name: ClassVar[str] = "skvq"
    takes = frozenset({"scale_bits"})

    def layout(self, side: str) -> dict[str, Held]:
        """Return the grid's arrays and the order [batch, heads, head_dim] of a block's channels."""
        return {**super().layout(side), "order": Held("scales")}

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return the grid's, and 1 byte a channel and head (2 from 257 channels on)."""
        grid = super().terms(side, s, heads, tokens, head_dim, picked)
        return {**grid, "scales": grid["scales"] + heads * head_dim * (1 if head_dim <= 256 else 2)}

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Store the order and the codes of the channels in it."""
        import mlx.core as mx

        from gear.outliers import index_dtype

        inf = float("inf")
        low = rows.filled(rows.x, inf).min(axis=-2)
        spread = rows.filled(rows.x, -inf).max(axis=-2) - low  # -inf: a channel of outliers alone
        order = mx.argsort(spread, axis=-1)
        store.add("order", order.astype(index_dtype(rows.x.shape[-1])), None)
        seen = super().store(store, self._ordered(rows, order), s)
        return mx.take_along_axis(seen, mx.argsort(order, axis=-1)[..., None, :], axis=-1)

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return code · scale + zero, channels back in their places."""
        import mlx.core as mx

        rows = super().read(arrays, side, s, tokens, head_dim)
        return mx.take_along_axis(rows, mx.argsort(arrays["order"], axis=-1)[..., None, :], axis=-1)

    def _ordered(self, rows: Rows, order: mx.array) -> Rows:
        """Return rows with their channels in ``order``, and where the outliers then stand."""
        import mlx.core as mx

        places = rows.places
        if places is not None and rows.across:  # a vector is a channel
            places = mx.take_along_axis(places, order[..., None], axis=-2)
        elif places is not None:
            back = mx.argsort(order, axis=-1)[..., None, :]
            places = mx.take_along_axis(back, places, axis=-1)
        x = mx.take_along_axis(rows.x, order[..., None, :], axis=-1)
        return replace(rows, x=x, places=places)

    def _ranges(self, rows: Rows, s: SideSettings) -> tuple[mx.array, mx.array]:
        from gear.quantize import min_max

        return min_max(rows, s.group_size, s.bits, clip=True)


@dataclass
class Skvq(GearFamily):
    """Ordered channels in clipped groups; sinks and a window stay exact."""

    bits: int = 2
    """Bits per code, 1..8."""
    group_size: int = 32
    """Channels that share a scale."""
    n_sink: int = 5
    """First tokens kept exact."""
    recent: int = 128
    """Newest tokens kept exact on top of the buffer."""

    name: ClassVar[str] = "skvq"
    switches: ClassVar[dict[str, Any]] = {
        "base": "skvq", "rank": 0, "rank_decode": 0, "sparse_frac": 0.0, "clip": False,
    }  # fmt: skip
