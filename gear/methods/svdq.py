"""svdq: keys in latent channels of falling importance, more bits for the first (arXiv:2502.15304).

    K - mean = Z Vᵀ,  V by SVD of a head's block;  the channels of Z in eight groups of 8, 4, 2, 1,
    1, 0, 0 and 0 bits: 2 on average, the last three groups are dropped

Keys only; values are the grouped base at gear.bits (gear.v). Stored: packed codes of each latent
channel, its scale and zero, the kept columns of V and the mean in fp16. A range is min/max shrunk
for least error; at one bit, where min/max is worse than nothing, mean ± mean distance.

Every block has axes of its own, decode blocks too, which cost 16·kept/n_b bits an element: so n_b
is 256. The paper takes them from the prefill once, before RoPE (here: after), and combines this
with sparse attention, which is left out. Axes shared by the heads fit none of them. No calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from gear.bases import Base, Held
from gear.bytes import packed_words
from gear.checks import SettingError
from gear.methods.family import GearFamily

if TYPE_CHECKING:
    import mlx.core as mx

    from gear.config import SideSettings
    from gear.outliers import Rows
    from gear.precision import Store

SCHEDULE = "84211000"
_WIDTHS = range(8, 0, -1)


class SvdqBase(Base):
    """Codes of latent channels, which a head's block has for itself."""

    name: ClassVar[str] = "svdq"
    graph = False
    defaults: ClassVar[Mapping[str, Any]] = {"schedule": SCHEDULE}

    def check(self, side: str, s: SideSettings, where: str) -> None:
        """Refuse bits that rise, or are none."""
        plan = str(s.option("schedule"))
        falls = list(plan) == sorted(plan, reverse=True)
        if not (falls and plan.strip("0") and set(plan) <= set("012345678")):
            raise SettingError(
                f"{where}base_options.schedule", plan,
                "a digit from 0 to 8, the bits, for each group of latent channels, never rising",
                f"Default: {SCHEDULE!r}.",
            )  # fmt: skip

    def default_block(self, s: SideSettings) -> int:
        """Return 256: the axes are paid once a block."""
        return 256

    def layout(self, side: str) -> dict[str, Held]:
        """Return the codes of each width along tokens, and what a block has once."""
        codes = {f"codes_{bits}": Held("codes", 3) for bits in _WIDTHS}
        return codes | dict.fromkeys(("scale", "zero", "axes", "mean"), Held("scales"))

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return 4·ceil(N·b/32) a latent channel of b bits; 2·(kept·(D + 2) + D) a head."""
        runs = _runs(s, head_dim)
        kept = sum(channels for _, channels in runs)
        words = sum(channels * packed_words(tokens, bits) for bits, channels in runs)
        return {
            "codes": heads * 4 * words,
            "scales": heads * 2 * (kept * (head_dim + 2) + head_dim),
        }

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Store the mean and the axes, then codes of what the stored ones make of the rows."""
        import mlx.core as mx

        from gear.latent import principal, store_axes, store_channels
        from gear.precision import values_need_fp32

        there = rows.filled(mx.ones_like(rows.x), 0).sum(axis=-2)
        mean = rows.filled(rows.x, 0).sum(axis=-2) / mx.maximum(there, 1)
        mean = store.add("mean", mean, values_need_fp32(mean))
        centred = rows.filled(rows.x - mean[..., None, :], 0)
        tokens, head_dim = rows.x.shape[-2:]
        runs = _runs(s, head_dim)
        kept = sum(channels for _, channels in runs)
        axes = store_axes(store, principal(centred)[1][..., :kept, :])
        store_channels(store, axes @ centred.swapaxes(-1, -2), runs)
        return self.read(store.arrays, rows.side, s, tokens, head_dim)

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return (code · scale + zero) Vᵀ + mean; without a block axis as `store` has none."""
        from gear.coarse import off_grid as fp32
        from gear.latent import read_channels

        latent = read_channels(arrays, _runs(s, head_dim), tokens)
        return latent.swapaxes(-1, -2) @ fp32(arrays, "axes") + fp32(arrays, "mean")[..., None, :]

    def cut(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, start: int, stop: int
    ) -> dict[str, mx.array]:
        """Return some of the words of every latent channel."""
        from gear.pack import cut_packed

        cut = {f"codes_{bits}": bits for bits in _WIDTHS if f"codes_{bits}" in arrays}
        return {n: cut_packed(a, cut[n], start, stop) if n in cut else a for n, a in arrays.items()}


def _runs(s: SideSettings, head_dim: int) -> list[tuple[int, int]]:
    """Return each width that is used, widest first, and how many latent channels have it."""
    plan = [int(bits) for bits in s.option("schedule")]
    ends = [head_dim * i // len(plan) for i in range(len(plan) + 1)]
    sizes = [ends[i + 1] - ends[i] for i in range(len(plan))]
    sums = {b: sum(n for each, n in zip(plan, sizes, strict=True) if each == b) for b in _WIDTHS}
    return [(bits, channels) for bits, channels in sums.items() if channels]


@dataclass
class Svdq(GearFamily):
    """Keys in latent channels, values grouped."""

    schedule: str = SCHEDULE
    """Bits of each group of latent channels of K, a digit a group; 0 = dropped."""

    name: ClassVar[str] = "svdq"
    switches: ClassVar[dict[str, Any]] = {"rank": 0, "rank_decode": 0, "sparse_frac": 0.0}
    switches_k: ClassVar[dict[str, Any]] = {"base": "svdq"}

    def __post_init__(self) -> None:
        """Make values grouped, whatever the base of gear= is; gear.v.base still wins."""
        super().__post_init__()
        self.settings = replace(self.settings, base="grouped", base_options={})
