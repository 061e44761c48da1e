"""Fresh compressed caches for every generation of a model: ``with gear.compressed(model, config)``.

mlx-lm asks ``model.make_cache()`` once per generation. A list made once and handed out again makes
the second run start at the first one's offset; here each call makes a new list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from unittest.mock import patch

from mlx_lm.models.cache import KVCache

from gear.attention import TILE_TOKENS
from gear.config import GearConfig
from gear.methods.gear import Gear
from gear.routing import Route, native_caches, routed


class CacheMaker(Protocol):
    """What makes the cache of one layer: a method of gear.methods, or a `KVCacheConfig`."""

    def make_cache(self, layer: int, n_layers: int) -> Any:
        """Return a fresh cache for ``layer`` of ``n_layers``."""
        ...


def fresh_caches(model: Any, maker: CacheMaker, route: Route | None = None) -> list[Any]:
    """Return new caches for ``model``, one per layer: the maker's where it uses a plain `KVCache`.

    Sliding-window, SSM and chunked layers keep their own cache. The model's class says which
    those are, whatever ``make_cache`` was put on the instance. Caches that can attend to what they
    hold (GEAR's family, evicting ones) do so on layers of ``route``. Errors: ``ValueError`` for a
    model without a plain `KVCache`.
    """
    caches = native_caches(model)
    covered = [index for index, cache in enumerate(caches) if type(cache) is KVCache]
    if not covered:
        kinds = ", ".join(sorted({type(cache).__name__ for cache in caches}))
        raise ValueError(
            f"{type(model).__module__}.{type(model).__name__}: no layer uses a plain KVCache (it "
            f"has {kinds}), so nothing would be compressed; use a model with full attention."
        )
    for index in covered:
        caches[index] = maker.make_cache(index, len(caches))
        if route is not None and index in route.layers and hasattr(caches[index], "route"):
            caches[index].route = route
    return caches


@contextmanager
def compressed(
    model: Any, config: GearConfig | CacheMaker, tile: int = TILE_TOKENS
) -> Iterator[None]:
    """Give every generation of ``model`` inside the block fresh caches and packed attention.

    ``config`` is a `GearConfig`, a `KVCacheConfig` or a method of gear.methods, such as
    ``gear.methods.kivi.Kivi(GearConfig(bits=4))``; ``tile`` the number of tokens that many queries
    unpack at a time (gear/routing.py says which models keep the dense way). Afterwards the model
    is as it was. Errors: ``ValueError`` (`SettingError` for a setting) on entry, before anything
    is generated.
    """
    maker = Gear(config) if isinstance(config, GearConfig) else config
    if isinstance(maker, type) or not callable(getattr(maker, "make_cache", None)):
        raise ValueError(
            f"config={config!r}: must be a GearConfig, a KVCacheConfig or a method of "
            "gear.methods, made with its options."
        )
    fresh_caches(model, maker)  # what is wrong is said here
    with routed(model, tile) as route:

        def make_cache(*_args: Any, **_options: Any) -> list[Any]:
            return fresh_caches(model, maker, route)

        with patch.object(model, "make_cache", make_cache, create=True):
            yield
