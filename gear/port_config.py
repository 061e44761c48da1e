"""VeloxQuant-MLX's snippet: `KVCacheConfig`, `KVCacheBuilder` and `KVCacheFactory`.

It means the port's GEAR: groups of 32, outliers of what base and low rank left, and a prefill pass
that sees reconstructed K and V. Two things differ: single decode tokens wait in the buffer (alone
they would cost more than fp16), and the default rank is 4 (the port's None would exceed fp16).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

from gear.config import (
    GearConfig,
    LayerSettings,
    SettingError,
    check_fraction,
    check_integer,
    check_one_of,
    resolve,
)
from gear.generation import fresh_caches
from gear.port_cache import PortCache, refuse_port_block


@dataclass(frozen=True)
class KVCacheConfig:
    """The port's settings of GEAR, checked when made.

    Errors: `SettingError` naming the field, its value, what is allowed and, for an unknown field,
    the nearest name.
    """

    method: str = "gear"
    """The one method of this interface; the others are in gear.methods."""
    head_dim: int = 128
    """Of a cache made without a model; a model's caches go by its own."""
    gear_bits: int = 2
    """Bits per code, 1..8."""
    gear_rank: int | None = 4
    """Rank of L·R in every block; None = by energy, up to 16 (CPU only; 2 in decode blocks)."""
    gear_energy_threshold: float = 0.9
    """Share of the singular values' sum that gear_rank=None must reach."""
    gear_sparse_fraction: float = 0.01
    """Share of a block's entries kept as outliers; 0 = none."""
    gear_group_size: int = 32
    """Entries that share a scale: tokens for K, channels for V."""
    gear_quantize_values: bool = True
    """False leaves V exact."""

    def __new__(cls, *_values: object, **settings: object) -> KVCacheConfig:
        """Refuse unknown names before the fields are set."""
        names = [f.name for f in fields(cls)]
        for name, value in settings.items():
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
                raise SettingError(
                    name, value, "left out (no such setting)",
                    f"Did you mean {near}? Settings: {', '.join(names)}.",
                )  # fmt: skip
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every field, and that a block costs less than fp16 at head_dim."""
        check_one_of("method", self.method, ("gear",))
        check_integer("head_dim", self.head_dim, 1)
        check_integer("gear_bits", self.gear_bits, 1, 8)
        if self.gear_rank is not None:
            check_integer("gear_rank", self.gear_rank, 0)
        check_fraction("gear_energy_threshold", self.gear_energy_threshold)
        check_fraction("gear_sparse_fraction", self.gear_sparse_fraction, "0.5% is written 0.005.")
        check_integer("gear_group_size", self.gear_group_size, 1)
        check_one_of("gear_quantize_values", self.gear_quantize_values, (True, False))
        default = type(self).gear_energy_threshold
        if self.gear_rank is not None and self.gear_energy_threshold != default:
            raise SettingError(
                "gear_energy_threshold", self.gear_energy_threshold,
                f"{default} beside a fixed gear_rank, which leaves it unused",
                "Set gear_rank=None to pick the rank by energy.",
            )  # fmt: skip
        for side in ("k", "v") if self.gear_quantize_values else ("k",):
            refuse_port_block(self.settings(), side, self.head_dim)

    def settings(self) -> LayerSettings:
        """Return what this means in GEAR's own settings."""
        group, rank = self.gear_group_size, self.gear_rank
        config = GearConfig(
            bits=self.gear_bits, group_size=group, n_b=-(-64 // group) * group, rank=rank,
            rank_decode=2 if rank is None else rank, energy="nuclear",
            energy_threshold=self.gear_energy_threshold, sparse_frac=self.gear_sparse_fraction,
            outlier_stage="post_lowrank", attend="compressed",
        )  # fmt: skip
        return resolve(config, 1)[0]

    def make_cache(self, layer: int, n_layers: int) -> PortCache:
        """Return a fresh cache for one layer; all layers are alike."""
        return PortCache(self.settings(), layer, exact_values=not self.gear_quantize_values)


class KVCacheFactory:
    """Makes single caches."""

    @staticmethod
    def create(config: KVCacheConfig) -> PortCache:
        """Return one fresh cache."""
        return config.make_cache(-1, 1)


class KVCacheBuilder:
    """Makes the caches of a model."""

    @staticmethod
    def for_model(model: Any, config: KVCacheConfig) -> list[Any]:
        """Return a plain list of fresh caches, one per layer: call it once per generation.

        ``model.make_cache = lambda *_a, **_k: KVCacheBuilder.for_model(model, config)``, or
        `gear.compressed`. Layers that use no plain `KVCache` keep their own.
        """
        return fresh_caches(model, config)
