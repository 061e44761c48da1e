"""agetiered: fewer bits for older tokens. No paper: a plain schedule that methods are held against.

    age < 128: 8 bits;  age < 1024: 4 bits;  older: 2 bits;  min/max in KIVI's groups (grouped)

Ages are counted in tokens since; a block of n_b tokens goes by its youngest. Tokens wait exact in
the buffer until they fill a block. Stored: packed codes, scales and zeros, in three tiers.

A block that gets older is quantized again from its stored codes. With 8, 4 and 2 bits that costs
nothing that counts: a group keeps its min and max, and 3 divides 15 divides 255, so each grid lies
in the one before, and only entries that the first rounding puts on a tie may fall on its other side
(normal data: the error of 8 -> 4 -> 2 bits is within 1e-4 of that of 2 bits at once). Bits whose
grids are not nested (4 -> 3) lose more. A prompt is put into its tiers at once.

It is a schedule in time over `grouped`, and no base: a block has no age. No calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any, ClassVar

from gear.checks import SettingError, check_integer
from gear.config import LayerSettings
from gear.methods.family import GearFamily


@dataclass
class AgeTiered(GearFamily):
    """8, 4 and 2 bits by age."""

    bits: int = 8
    """Bits of blocks younger than middle_age."""
    middle_age: int = 128
    """Age in tokens from which on a block has middle_bits."""
    middle_bits: int = 4
    """Bits of blocks younger than old_age."""
    old_age: int = 1024
    """Age in tokens from which on a block has old_bits."""
    old_bits: int = 2
    """Bits of all others."""

    name: ClassVar[str] = "agetiered"
    aside: ClassVar[frozenset[str]] = frozenset(
        {"middle_age", "middle_bits", "old_age", "old_bits"}
    )
    switches: ClassVar[dict[str, Any]] = {
        "base": "grouped", "rank": 0, "rank_decode": 0, "sparse_frac": 0.0, "scale_bits": 16,
    }  # fmt: skip

    def tiers(self) -> tuple[tuple[int, int], ...]:
        """Return (age from which on, bits), youngest first; refuse what is not in order."""
        bits = self.bits, self.middle_bits, self.old_bits
        for name, value in zip(("bits", "middle_bits", "old_bits"), bits, strict=True):
            check_integer(f"cache.{name}", value, 1, 8)
        if not bits[0] >= bits[1] >= bits[2]:
            raise SettingError("cache.old_bits", bits, "no more bits for older tokens")
        check_integer("cache.middle_age", self.middle_age, 1)
        check_integer("cache.old_age", self.old_age, self.middle_age)
        return (0, bits[0]), (self.middle_age, bits[1]), (self.old_age, bits[2])

    def layers(self, n_layers: int) -> list[LayerSettings]:
        """Return the validated settings of the youngest tier per layer."""
        self.tiers()
        layers = super().layers(n_layers)
        unit = lcm(32, *(layer.k.group_size for layer in layers))
        if layers and layers[0].n_b % unit:
            raise SettingError(
                "gear.n_b", layers[0].n_b, f"a multiple of {unit}",
                "Blocks change their bits, so they must be whole words and groups.",
            )  # fmt: skip
        return layers

    def plan(self, n_layers: int) -> list[dict[str, Any]]:
        """Return the resolved settings per layer as plain values, the tiers among them."""
        tiers = [list(tier) for tier in self.tiers()]
        return [{**layer.as_dict(), "tiers": tiers} for layer in self.layers(n_layers)]

    def make_cache(self, layer: int, n_layers: int) -> Any:
        """Return a fresh cache for one layer."""
        from gear.age_tiers import AgeTieredCache

        return AgeTieredCache(self.layers(n_layers)[layer], layer, self.tiers())
