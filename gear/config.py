"""GEAR's settings: one typed schema, its validation, and what it resolves to per layer and side.

X ~= Quant_b(X) + L·R + S (arXiv:2403.05527). This module knows the *settings* of the three terms
and nothing of arrays: it imports no MLX, so the parent process of a sweep may use it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

BASES = ("grouped", "vector", "affine_mlx")
SOLVERS = ("power", "gram", "svd")
OUTLIER_STAGES = ("pre_quant", "post_lowrank")
ENERGIES = ("squared", "nuclear")
ATTENDS = ("exact", "compressed")


class SettingError(ValueError):
    """An unusable setting: the text names field, value, what is allowed and a next step."""

    def __init__(self, name: str, value: object, allowed: str, hint: str = "") -> None:
        self.name, self.value = name, value
        super().__init__(f"{name}={value!r}: must be {allowed}.{' ' + hint if hint else ''}")


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
    """Quantizer of the base: grouped (KIVI's groups), vector (KCVT), affine_mlx (mx.quantize)."""
    group_size: int = 64
    """Entries that share a scale: tokens for K, channels for V."""
    n_b: int | None = None
    """Tokens of a decode block (streaming buffer); null = max(64, group_size), 20 for vector."""
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
        return asdict(self)


_SIDE_NAMES = tuple(f.name for f in fields(SideSettings))
_SHARED_NAMES = tuple(f.name for f in fields(LayerSettings) if f.name not in ("k", "v", "n_b"))


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse anything but an int (bool excluded) within [low, high]."""
    allowed = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError(name, value, allowed)
    if value < low or (high is not None and value > high):
        raise SettingError(name, value, allowed)


def check_fraction(name: str, value: object, hint: str = "") -> None:
    """Refuse anything but a finite number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingError(name, value, "a number in [0, 1]", hint)
    if not 0 <= value <= 1:
        raise SettingError(name, value, "a number in [0, 1]", hint)


def check_one_of(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    """Refuse a value that is not one of ``allowed`` (1 is not True here)."""
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        raise SettingError(name, value, "one of " + ", ".join(map(str, allowed)))


def _check_side(side: SideSettings, where: str) -> None:
    """Validate one side's values; ``where`` is the prefix of the field's name in errors."""
    check_integer(f"{where}bits", side.bits, 1, 8)
    check_integer(f"{where}group_size", side.group_size, 1)
    check_one_of(f"{where}base", side.base, BASES)
    if side.rank is not None:
        check_integer(f"{where}rank", side.rank, 0)
    check_integer(f"{where}rank_decode", side.rank_decode, 0)
    check_fraction(f"{where}sparse_frac", side.sparse_frac, "2% is written 0.02.")
    check_one_of(f"{where}factor_bits", side.factor_bits, (16, 8, 4))
    check_one_of(f"{where}outlier_bits", side.outlier_bits, (16, 8))
    check_one_of(f"{where}scale_bits", side.scale_bits, (16, 8))
    check_one_of(f"{where}clip", side.clip, (True, False))
    if side.base == "affine_mlx":
        check_one_of(f"{where}group_size", side.group_size, (32, 64, 128))
        check_one_of(f"{where}bits", side.bits, (2, 3, 4, 5, 6, 8))
        if side.clip or side.scale_bits != 16:
            raise SettingError(
                f"{where}base", side.base, "grouped or vector with clip or scale_bits=8",
                "mx.quantize chooses its own range and stores 16-bit scales.",
            )  # fmt: skip


def _side(config: GearConfig, *overrides: SideConfig) -> SideSettings:
    """Fill one side: the common value, then each override that is set, later ones winning."""
    values = {name: getattr(config, name) for name in _SIDE_NAMES}
    for override in overrides:
        values.update({n: v for n in _SIDE_NAMES if (v := getattr(override, n)) is not None})
    return SideSettings(**values)


def _block_tokens(config: GearConfig, keys: list[SideSettings]) -> int:
    """Return n_b: as given, else by the base of K; it must hold whole token groups."""
    n_b = config.n_b
    if n_b is None:
        n_b = max(20 if k.base == "vector" else max(64, k.group_size) for k in keys)
    check_integer("gear.n_b", n_b, 1)
    for k in keys:
        if k.base != "vector" and n_b % k.group_size:
            raise SettingError(
                "gear.n_b", n_b, f"a multiple of K's group_size {k.group_size}",
                "K is grouped along tokens, so a block must hold whole groups.",
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
    _check_side(_side(config), "gear.")
    for index in config.by_layer:
        check_integer("gear.by_layer", index, 0, n_layers - 1)
    sides = []
    for index in range(n_layers):
        layer = config.by_layer.get(index, LayerConfig())
        k, v = _side(config, config.k, layer.k), _side(config, config.v, layer.v)
        prefix = f"gear.by_layer.{index}." if index in config.by_layer else "gear."
        _check_side(k, prefix + "k.")
        _check_side(v, prefix + "v.")
        sides.append((k, v))
    n_b = _block_tokens(config, [k for k, _ in sides])
    shared = {name: getattr(config, name) for name in _SHARED_NAMES}
    return [LayerSettings(k=k, v=v, n_b=n_b, **shared) for k, v in sides]


def with_switches(config: GearConfig, **fixed: Any) -> GearConfig:
    """Return ``config`` with ``fixed`` values forced, overrides by side and layer included.

    This is how ``kivi`` or ``gear_l`` are GEAR's own numbers with a term switched off.
    """

    def force(side: SideConfig) -> SideConfig:
        return replace(side, **dict.fromkeys(fixed))

    layers = {i: LayerConfig(k=force(c.k), v=force(c.v)) for i, c in config.by_layer.items()}
    return replace(config, **fixed, k=force(config.k), v=force(config.v), by_layer=layers)
