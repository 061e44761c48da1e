"""What the methods of GEAR's family share: GEAR's own numbers with some terms switched off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from gear.bytes import refuse_larger_than_fp16
from gear.config import GearConfig, LayerSettings, resolve, with_switches


@dataclass
class GearFamily:
    """Base of the family; a member names its ``switches``, settings that it fixes."""

    settings: GearConfig = field(default_factory=GearConfig)
    """GEAR's numbers: ${gear}."""

    name: ClassVar[str]
    uses_gear: ClassVar[bool] = True
    compresses: ClassVar[bool] = True
    accounting_only: ClassVar[bool] = False
    switches: ClassVar[dict[str, Any]] = {}

    def layers(self, n_layers: int) -> list[LayerSettings]:
        """Return the validated settings per layer, switches applied."""
        return resolve(with_switches(self.settings, **self.switches), n_layers)

    def plan(self, n_layers: int) -> list[dict[str, Any]]:
        """Return the resolved settings per layer as plain values."""
        return [layer.as_dict() for layer in self.layers(n_layers)]

    def check_shape(self, n_layers: int, kv_heads: int, head_dim_k: int, head_dim_v: int) -> None:
        """Refuse settings whose blocks would cost fp16's bytes or more."""
        for index, layer in enumerate(self.layers(n_layers)):
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

    def make_cache(self, layer: int, n_layers: int) -> Any:
        """Return a fresh GearCache for one layer."""
        from gear.cache import GearCache

        return GearCache(self.layers(n_layers)[layer], layer)
