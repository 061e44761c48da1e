"""GEAR's settings: one typed schema, its validation, and what it resolves to per layer and side.

X ~= Quant_b(X) + L·R + S (arXiv:2403.05527). This module knows the *settings* of the three terms
and nothing of arrays: it imports no MLX, so the parent process of a sweep may use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gear.bases import BASES, Options, load_base
from gear.calibration import reference
from gear.checks import SettingError, check_fraction, check_integer, check_one_of

SOLVERS = ("power", "gram", "svd")
OUTLIER_STAGES = ("pre_quant", "post_lowrank")
ENERGIES = ("squared", "nuclear")
ATTENDS = ("exact", "compressed")


@dataclass
class SideConfig:
    """Overrides for K or V alone; ``None`` takes the common value of :class:`GearConfig`."""

    bits: int | None = None
    group_size: int | None = None
    base: str | None = None
    rank: int | None = None
    rank_decode: int | None = None
    sparse_frac: float | None = None
    factor_bits: int | None = None
    outlier_bits: int | None = None
    scale_bits: int | None = None
    clip: bool | None = None
    base_options: dict[str, Any] = field(default_factory=dict)


@dataclass
class LayerConfig:
    """Overrides for one layer, by side."""

    k: SideConfig = field(default_factory=SideConfig)
    v: SideConfig = field(default_factory=SideConfig)


@dataclass
class GearConfig:
    """Every setting of GEAR (the closed list). Units: tokens, bits, fractions of a vector.

    Errors: :func:`resolve` raises :class:`SettingError` for a value that is out of range.
    """

    bits: int = 2
    """Bits per code of the base, 1..8."""
    base: str = "grouped"
    """Quantizer of the base: grouped (KIVI's groups), vector (KCVT), affine_mlx (mx.quantize), or
    a method of the tables by its name (per_token)."""
    base_options: dict[str, Any] = field(default_factory=dict)
    """The base's own options, where it has some: '+gear.base_options={NAME: value}'."""
    group_size: int = 64
    """Entries that share a scale: tokens for K, channels for V."""
    n_b: int | None = None
    """Tokens of a decode block (streaming buffer); null = what K's base asks for: grouped
    max(64, group_size), vector 20."""
    rank: int | None = 4
    """Rank of L·R in prefill blocks; 0 = no low-rank term, null = by energy_threshold."""
    rank_decode: int = 2
    """Rank of L·R in decode blocks."""
    max_rank: int = 16
    """Largest rank that rank=null may pick."""
    energy: str = "squared"
    """What energy_threshold counts: squared singular values, or nuclear (plain sum, the port)."""
    energy_threshold: float = 0.9
    """Share of the residual's energy that rank=null must reach."""
    solver: str = "power"
    """Low-rank solver: power (stays on the accelerator), gram or svd (CPU reference)."""
    iterations: int = 2
    """Power iterations."""
    seed: int = 0
    """Seed of the power iteration's start."""
    sparse_frac: float = 0.02
    """Share of each vector kept as outliers in S, half smallest and half largest; 0 = no S."""
    outlier_stage: str = "pre_quant"
    """pre_quant (paper: outliers out before the base) or post_lowrank (port: of what is left)."""
    factor_bits: int = 16
    """Bits of L and R: 16, 8 or 4."""
    outlier_bits: int = 16
    """Bits of the values of S: 16 or 8."""
    scale_bits: int = 16
    """Bits of the base's scale and zero: 16 or 8."""
    clip: bool = False
    """Shrink each group's range to the factor with least squared error. Use with n_sink: without
    exact sinks it doubles the KL (measured on SmolLM2-135M), with 4 sinks it helps V."""
    n_sink: int = 0
    """First tokens kept exact and out of every statistic."""
    recent: int = 0
    """Newest tokens kept exact on top of the buffer."""
    attend: str = "exact"
    """What a pass sees of its own tokens: exact (paper) or compressed (port; streaming prefill)."""
    allow_larger_than_fp16: bool = False
    """Accept blocks that cost 16 bits per element or more."""
    k: SideConfig = field(default_factory=SideConfig)
    """Overrides for K: gear.k.bits=4."""
    v: SideConfig = field(default_factory=SideConfig)
    """Overrides for V: gear.v.rank=8."""
    by_layer: dict[int, LayerConfig] = field(default_factory=dict)
    """Overrides by layer: '+gear.by_layer={10: {k: {bits: 4}}}'."""


@dataclass(frozen=True)
class SideSettings:
    """The settings of K or V in one layer, every value filled in."""

    bits: int
    group_size: int
    base: str
    rank: int | None
    rank_decode: int
    sparse_frac: float
    factor_bits: int
    outlier_bits: int
    scale_bits: int
    clip: bool
    base_options: Options = ()
    """Every option of the base with its value, by name."""

    def option(self, name: str) -> Any:
        """Return the value of one of the base's options."""
        return dict(self.base_options)[name]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SideSettings:
        """Return the settings of plain values, as `LayerSettings.as_dict` gives them."""
        options = values.get("base_options", {})
        held = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
        return cls(**{**values, "base_options": tuple(sorted(held.items()))})

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; base_options only where there are some."""
        values = asdict(self)
        options = {n: [*v] if isinstance(v, tuple) else v for n, v in self.base_options}
        del values["base_options"]
        return {**values, "base_options": options} if options else values


@dataclass(frozen=True)
class LayerSettings:
    """What one layer's cache does: both sides, and the settings that K and V share."""

    k: SideSettings
    v: SideSettings
    n_b: int
    max_rank: int
    energy: str
    energy_threshold: float
    solver: str
    iterations: int
    seed: int
    outlier_stage: str
    n_sink: int
    recent: int
    attend: str
    allow_larger_than_fp16: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for records and keys."""
        return {**asdict(self), "k": self.k.as_dict(), "v": self.v.as_dict()}


_SIDE_NAMES = tuple(f.name for f in fields(SideSettings))
_PLAIN_NAMES = tuple(name for name in _SIDE_NAMES if name != "base_options")
_SHARED_NAMES = tuple(f.name for f in fields(LayerSettings) if f.name not in ("k", "v", "n_b"))


def _check_side(name: str, side: SideSettings, where: str) -> None:
    """Validate the values of side ``name``; ``where`` is the field's prefix in errors."""
    check_integer(f"{where}bits", side.bits, 1, 8)
    check_integer(f"{where}group_size", side.group_size, 1)
    if side.rank is not None:
        check_integer(f"{where}rank", side.rank, 0)
    check_integer(f"{where}rank_decode", side.rank_decode, 0)
    check_fraction(f"{where}sparse_frac", side.sparse_frac, "2% is written 0.02.")
    check_one_of(f"{where}factor_bits", side.factor_bits, (16, 8, 4))
    check_one_of(f"{where}outlier_bits", side.outlier_bits, (16, 8))
    check_one_of(f"{where}scale_bits", side.scale_bits, (16, 8))
    check_one_of(f"{where}clip", side.clip, (True, False))
    base = load_base(side.base)
    base.check_common(side, where)
    base.check(name, side, where)


def _side(
    config: GearConfig, side: str, where: str, layer: int, *overrides: SideConfig
) -> SideSettings:
    """Fill a side: the common value, then each override that is set, later ones winning.

    ``side`` is "k", "v", or "" for what both have in common. Another base does not get the options
    that were meant for the one before it.
    """
    values: dict[str, Any] = {name: getattr(config, name) for name in _SIDE_NAMES}
    for override in overrides:
        if override.base not in (None, values["base"]):
            values["base_options"] = {}
        values.update({n: v for n in _PLAIN_NAMES if (v := getattr(override, n)) is not None})
        values["base_options"] = {**values["base_options"], **override.base_options}
    check_one_of(f"{where}base", values["base"], tuple(BASES))
    options = dict(load_base(values["base"]).options(values["base_options"], where))
    if path := options.get("calibration"):
        options["calibration"] = reference(path, layer, side, f"{where}base_options.calibration")
    settings = SideSettings(**{**values, "base_options": tuple(options.items())})
    _check_side(side, settings, where)
    return settings


def _block_tokens(config: GearConfig, sides: list[tuple[SideSettings, SideSettings]]) -> int:
    """Return n_b: as given, else by the base of K; it must be one that both sides can use."""
    n_b = config.n_b
    if n_b is None:
        least = (load_base(v.base).least_block(v) for _, v in sides)
        n_b = max(*(load_base(k.base).default_block(k) for k, _ in sides), *least)
    check_integer("gear.n_b", n_b, 1)
    for pair in sides:
        for kind, side in zip("kv", pair, strict=True):
            base = load_base(side.base)
            check_integer("gear.n_b", n_b, base.least_block(side))
            unit = base.unit(kind, side)
            if n_b % unit:
                raise SettingError(
                    "gear.n_b", n_b, f"a multiple of {unit}",
                    f"{kind.upper()} of base={side.base} is grouped along tokens (group_size "
                    f"{side.group_size}), so a block must hold whole groups.",
                )  # fmt: skip
    return n_b


def resolve(config: GearConfig, n_layers: int) -> list[LayerSettings]:
    """Return the settings of each of ``n_layers`` layers, validated.

    Raises :class:`SettingError` naming the field (``gear.v.bits``), its value and what is allowed.
    """
    check_integer("gear.max_rank", config.max_rank, 1)
    check_integer("gear.iterations", config.iterations, 1)
    check_integer("gear.seed", config.seed, 0)
    check_integer("gear.n_sink", config.n_sink, 0)
    check_integer("gear.recent", config.recent, 0)
    check_fraction("gear.energy_threshold", config.energy_threshold)
    check_one_of("gear.energy", config.energy, ENERGIES)
    check_one_of("gear.solver", config.solver, SOLVERS)
    check_one_of("gear.outlier_stage", config.outlier_stage, OUTLIER_STAGES)
    check_one_of("gear.attend", config.attend, ATTENDS)
    check_one_of("gear.allow_larger_than_fp16", config.allow_larger_than_fp16, (True, False))
    _side(config, "", "gear.", 0)
    for index in config.by_layer:
        check_integer("gear.by_layer", index, 0, n_layers - 1)
    sides = []
    for index in range(n_layers):
        layer = config.by_layer.get(index, LayerConfig())
        prefix = f"gear.by_layer.{index}." if index in config.by_layer else "gear."
        k = _side(config, "k", prefix + "k.", index, config.k, layer.k)
        v = _side(config, "v", prefix + "v.", index, config.v, layer.v)
        sides.append((k, v))
    n_b = _block_tokens(config, sides)
    shared = {name: getattr(config, name) for name in _SHARED_NAMES}
    return [LayerSettings(k=k, v=v, n_b=n_b, **shared) for k, v in sides]
