"""What the methods of GEAR's family share: GEAR's own numbers with some terms switched off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from gear.bases import load_base
from gear.bytes import refuse_larger_than_fp16, refuse_shape
from gear.calibration import AUTO, FittedBase, Seen, is_auto
from gear.checks import SettingError
from gear.config import (
    GearConfig,
    LayerConfig,
    LayerSettings,
    SideConfig,
    SideSettings,
    resolve,
)

if TYPE_CHECKING:
    import mlx.core as mx


def _fitted(layer: LayerSettings) -> list[tuple[str, SideSettings]]:
    """Return the sides whose tensors come from the file ``auto``."""
    sides = [("k", layer.k), ("v", layer.v)]
    return [(n, s) for n, s in sides if is_auto(dict(s.base_options).get("calibration"))]


def _fitted_by(s: SideSettings) -> dict[str, Any]:
    """Return the settings and options that a base's fitted tensors depend on."""
    base = load_base(s.base)
    names = getattr(base, "fit_uses", {"bits", *base.defaults} - {"calibration"})
    return {n: getattr(s, n) if hasattr(s, n) else s.option(n) for n in names}


def _with_switches(
    config: GearConfig, fixed: Mapping[str, Any], k: Mapping[str, Any], v: Mapping[str, Any]
) -> GearConfig:
    """Return ``config`` with values forced: ``fixed`` for both sides, ``k`` and ``v`` for one.

    Overrides by side and layer included. This is how ``kivi`` or ``gear_l`` are GEAR's own numbers
    with a term switched off.
    """
    unset = SideConfig()

    def force(side: SideConfig, own: Mapping[str, Any], layer: bool = False) -> SideConfig:
        values = {n: getattr(unset, n) for n in (*fixed, *own) if hasattr(unset, n)}
        return replace(side, **values if layer else {**values, **own})

    layers = {
        i: LayerConfig(k=force(c.k, k, layer=True), v=force(c.v, v, layer=True))
        for i, c in config.by_layer.items()
    }
    sides = {"k": force(config.k, k), "v": force(config.v, v)}
    return replace(config, **fixed, **sides, by_layer=layers)


@dataclass
class GearFamily:
    """Base of the family; a member names its ``switches``, settings that it fixes.

    Its own fields, what conf/cache/NAME lists beside ``settings``, stand for GEAR's where GEAR has
    one of that name (bits); the others go to the base that it fixes, as ``base_options``.
    """

    settings: GearConfig = field(default_factory=GearConfig)
    """GEAR's numbers: ${gear}."""

    name: ClassVar[str]
    uses_gear: ClassVar[bool] = True
    compresses: ClassVar[bool] = True
    accounting_only: ClassVar[bool] = False
    switches: ClassVar[dict[str, Any]] = {}
    aside: ClassVar[frozenset[str]] = frozenset()
    """Own fields that `layers` puts to use, and that are no option of the base."""
    switches_k: ClassVar[dict[str, Any]] = {}
    """What it fixes for K alone: names of `gear.config.SideConfig`."""
    switches_v: ClassVar[dict[str, Any]] = {}
    """What it fixes for V alone."""
    fits_queries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Put own fields that GEAR has too in GEAR's place."""
        shared = {f.name for f in fields(GearConfig)} & {f.name for f in fields(self)}
        own = {name: getattr(self, name) for name in sorted(shared)}
        self.settings = _with_switches(self.settings, own, {}, {}) if own else self.settings

    def layers(self, n_layers: int) -> list[LayerSettings]:
        """Return the validated settings per layer, switches applied."""
        shared = {"settings", *self.aside, *(f.name for f in fields(GearConfig))}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in shared}
        fixed = [
            {**switches, "base_options": own} if "base" in switches else switches
            for switches in (self.switches, self.switches_k, self.switches_v)
        ]
        return resolve(_with_switches(self.settings, *fixed), n_layers)

    def plan(self, n_layers: int) -> list[dict[str, Any]]:
        """Return the resolved settings per layer as plain values."""
        return [layer.as_dict() for layer in self.layers(n_layers)]

    def check_shape(self, n_layers: int, kv_heads: int, head_dim_k: int, head_dim_v: int) -> None:
        """Refuse settings whose blocks do not fit, or would cost fp16's bytes or more."""
        for index, layer in enumerate(self.layers(n_layers)):
            refuse_shape(layer, head_dim_k, head_dim_v, index)
            refuse_larger_than_fp16(layer, kv_heads, head_dim_k, head_dim_v, index)

    def block_tokens(self) -> int | None:
        """Return n_b (it is the same in every layer)."""
        return self._common().n_b

    def recent_tokens(self) -> int:
        """Return gear.recent."""
        return self.settings.recent

    def _common(self) -> LayerSettings:
        """Return the first layer's settings, enough of them resolved for n_b."""
        return self.layers(max(self.settings.by_layer, default=0) + 1)[0]

    def fits(self, n_layers: int) -> dict[str, Any]:
        """Return by side what a base is that has its tensors from the file ``auto``."""
        found: dict[str, Any] = {}
        for layer in self.layers(n_layers):
            for side, s in _fitted(layer):
                own = {"base": s.base, "n_sink": layer.n_sink, **_fitted_by(s)}
                if found.setdefault(side, own) != own:
                    allowed = "a file's path where layers differ in what is fitted"
                    raise SettingError("calibration", AUTO, allowed)
        return found

    def fit(self, layer: int, n_layers: int, seen: Seen, seed: int) -> dict[str, mx.array]:
        """Return the tensors of a layer's bases; sinks, which are exact, are left out."""
        settings, found = self.layers(n_layers)[layer], {}
        for side, s in _fitted(settings):
            x, base = (seen.keys if side == "k" else seen.values), load_base(s.base)
            if x is None or not isinstance(base, FittedBase):
                raise ValueError(f"base={s.base}, layer {layer}: no K and V, or nothing to fit.")
            made = base.fit(side, x[:, :, settings.n_sink :], s, seed)
            found |= {f"{side}.{name}": array for name, array in made.items()}
        return found

    def make_cache(self, layer: int, n_layers: int) -> Any:
        """Return a fresh GearCache for one layer."""
        from gear.cache import GearCache

        return GearCache(self.layers(n_layers)[layer], layer)
