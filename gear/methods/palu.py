"""palu: low-rank latents of a group of heads, in few bits (arXiv:2407.21118), by SVD at run time.

    [X_1 … X_4] = Z A,  A the first r right singular vectors of a group of 4 heads side by side;
    r the least rank with 0.90 of the squared singular values;  Z at 4 or 2 bits

K and V alike. Heads share a group where 4, else 3 or 2, divide their number (all, below 4). All
groups of a block have the rank of the neediest, at most half of what the block or group allows
(``most``), because A is stored too. Stored: packed codes of Z, scale and zero of each latent and
group_size tokens (min/max, shrunk by gear.clip), and A [r, 4·head_dim] in fp16.

The paper factorises the projections' weights offline (SVD with Fisher-weighted rank search), so A
is the model's own, K's latents are rebuilt before RoPE and a Hadamard matrix in the weights makes
latents easy to quantize per token. Here A is each block's own, decode blocks included, and costs
16·r/n_b bits an element: n_b is 256, and long prefill blocks are the cheapest. No calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gear.bases import Base, Held
from gear.bytes import packed_words
from gear.checks import check_fraction
from gear.methods.family import GearFamily

if TYPE_CHECKING:
    import mlx.core as mx

    from gear.config import SideSettings
    from gear.outliers import Rows
    from gear.precision import Store


class PaluBase(Base):
    """Codes of latents that some heads share."""

    name: ClassVar[str] = "palu"
    graph = False
    takes = frozenset({"clip"})
    defaults: ClassVar[Mapping[str, Any]] = {"latent_energy": 0.9, "most": 0.5}

    def check(self, side: str, s: SideSettings, where: str) -> None:
        """Refuse shares outside 0 to 1."""
        for option in self.defaults:
            check_fraction(f"{where}base_options.{option}", s.option(option))

    def default_block(self, s: SideSettings) -> int:
        """Return at least 256 tokens: the axes are paid once a block."""
        return -(-256 // s.group_size) * s.group_size

    def unit(self, side: str, s: SideSettings) -> int:
        """Return the tokens of a group."""
        return s.group_size

    cut_unit = unit

    def layout(self, side: str) -> dict[str, Held]:
        """Return codes, scales and zeros along tokens, and the axes that a block has once."""
        along = {n: Held("scales", 3) for n in ("scale", "zero")}
        return {"codes": Held("codes", 3), **along, "axes": Held("scales")}

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return, for each latent of a group, 4·ceil(N·b/32) and 4·ceil(N/g) + 2·width."""
        groups, width = heads // _shared(heads), _shared(heads) * head_dim
        latents = groups * picked.get("rank", _most(s, tokens, width))
        scales = latents * (4 * -(-tokens // s.group_size) + 2 * width)
        return {"codes": latents * 4 * packed_words(tokens, s.bits), "scales": scales}

    def picked(self, arrays: Mapping[str, mx.array]) -> dict[str, int]:
        """Return the rank."""
        return {"rank": arrays["codes"].shape[2]}

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Store the axes, then codes of what the stored ones make of the rows."""
        import numpy as np

        from gear.coarse import store_ranges
        from gear.latent import by_energy, principal, store_axes, together
        from gear.outliers import Rows
        from gear.pack import pack
        from gear.quantize import encode, min_max

        tokens, head_dim = rows.x.shape[-2:]
        x = together(rows.filled(rows.x, 0), _shared(rows.x.shape[1]))
        energy, axes = principal(x)
        ranks = by_energy(energy, s.option("latent_energy"), _most(s, tokens, x.shape[-1]))
        # a batch row's axes past its own rank are 0: it is then what it is alone
        used = np.arange(ranks.max())[:, None] < ranks[:, None, None, None]
        seen = store_axes(store, np.where(used, axes[..., : ranks.max(), :], 0))
        latent = seen @ x.swapaxes(-1, -2)
        scale, zero = min_max(Rows(latent), s.group_size, s.bits, s.clip)
        scale, zero = store_ranges(store, scale, zero, 16)
        codes = encode(latent, scale, zero, s.bits, s.group_size)
        store.add("codes", pack(codes, s.bits), None)
        return self.read(store.arrays, rows.side, s, tokens, head_dim)

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return Z A, by head; without a block axis as `store` has none."""
        from gear.coarse import off_grid as fp32
        from gear.latent import apart
        from gear.pack import unpack
        from gear.quantize import decode

        codes = unpack(arrays["codes"], s.bits, tokens)
        latent = decode(codes, fp32(arrays, "scale"), fp32(arrays, "zero"), s.group_size)
        return apart(latent.swapaxes(-1, -2) @ fp32(arrays, "axes"), head_dim)

    def cut(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, start: int, stop: int
    ) -> dict[str, mx.array]:
        """Return some of the words and groups of every latent."""
        from gear.pack import cut_packed

        groups = slice(start // s.group_size, -(-stop // s.group_size))
        found = {n: arrays[n][..., groups] for n in ("scale", "zero")}
        return {**arrays, **found, "codes": cut_packed(arrays["codes"], s.bits, start, stop)}


def _shared(heads: int) -> int:
    """Return how many heads share latents: the most up to 4 that divide them."""
    return next(n for n in (4, 3, 2, 1) if heads % n == 0)


def _most(s: SideSettings, tokens: int, width: int) -> int:
    """Return the largest rank that a block may have."""
    return max(1, int(s.option("most") * min(tokens, width)))


@dataclass
class Palu(GearFamily):
    """Low-rank latents of head groups."""

    bits: int = 4
    """Bits per latent, 1..8."""
    latent_energy: float = 0.9
    """Share of the squared singular values that the rank must reach."""
    most: float = 0.5
    """Largest rank, as a share of the block's tokens or the group's channels."""

    name: ClassVar[str] = "palu"
    switches: ClassVar[dict[str, Any]] = {"base": "palu", "rank": 0, "rank_decode": 0,
                                          "sparse_frac": 0.0}  # fmt: skip
