"""Send a model's attention to the packed caches, without editing mlx-lm.

Most model files import `scaled_dot_product_attention` by name, so the name is replaced in the
modules that a model's layers come from, and put back afterwards. While a `Route` is open, a cache
that belongs to it returns light `Packed` handles in place of dense K and V, and the replacement
attends through gear/attention.py. Whether a model hands K and V over untouched is found out by one
forward pass that is built and never evaluated; a model that does something else with them keeps
the dense way, with a warning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from gear.attention import TILE_TOKENS, Packed

_NAME = "scaled_dot_product_attention"
_SIGNATURE = signature(base.scaled_dot_product_attention)


class Route:
    """The layers of one model that attend to packed caches, as long as ``open`` holds."""

    def __init__(self, layers: frozenset[int], tile: int) -> None:
        self.layers, self.tile, self.open = layers, tile, True

    def __deepcopy__(self, _memo: dict[int, Any]) -> Route:
        """Return itself: a copied cache belongs to the same model."""
        return self


@contextmanager
def routed(model: Any, tile: int = TILE_TOKENS) -> Iterator[Route]:
    """Open a `Route` for ``model``: its plain attention layers that hand K and V over untouched.

    ``tile`` is the number of tokens that many queries unpack at a time. Layers beyond the route
    reconstruct K and V, which a `RuntimeWarning` says.
    """
    # what mlx-lm loads from a model's own file stands in no list of modules
    names = {type(m).__module__ for m in model.modules()} & set(sys.modules)
    with ExitStack() as stack:
        for module in (sys.modules[name] for name in sorted(names)):
            original = getattr(module, _NAME, None)
            if original is not None:
                stack.enter_context(patch.object(module, _NAME, _dispatch(original)))
        plain, reached = _probe(model)
        if reached != plain:
            warnings.warn(
                f"{type(model).__module__}: {len(plain - reached)} of {len(plain)} layers do not "
                "pass K and V of the cache on to attention as they are; there GEAR reconstructs "
                "them, which takes fp16's memory.",
                RuntimeWarning,
                stacklevel=3,
            )
        route = Route(reached, tile)
        try:
            yield route
        finally:
            route.open = False


def _dispatch(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return ``original`` with a way through for `Packed` K and V."""

    @wraps(original)
    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, *args: Any, **kwargs: Any
    ) -> mx.array:
        if not isinstance(keys, Packed):
            return original(queries, keys, values, *args, **kwargs)
        bound = _SIGNATURE.bind(queries, keys, values, *args, **kwargs).arguments
        return keys.attend(queries, bound["scale"], bound.get("mask"), bound.get("sinks"))

    return scaled_dot_product_attention


class _Probe(KVCache):
    """An empty cache that says whether its K and V reach attention as they were returned."""

    reached = False
    handles: tuple[Packed, Packed] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Return handles whose attention is zeros."""
        self.offset += keys.shape[2]

        def attend(queries: mx.array, *_: object) -> mx.array:
            self.reached = True
            return mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)

        k, v = (Packed(new.shape, new.dtype, attend) for new in (keys, values))
        self.handles = k, v
        return k, v

    def keys_and_values(self) -> Any:
        """Return the last handles, for layers that share another one's K and V."""
        return self.handles


def _probe(model: Any) -> tuple[frozenset[int], frozenset[int]]:
    """Return the layers with a plain cache, and those among them that a route can serve."""
    caches = native_caches(model)
    plain = [i for i, cache in enumerate(caches) if type(cache) is KVCache]
    for index in plain:
        caches[index] = _Probe()
    try:
        model(mx.array([[0, 0]]), cache=caches)
    except Exception:  # a handle met what only an array can do: this model is not for routes
        return frozenset(plain), frozenset()
    return frozenset(plain), frozenset(i for i in plain if caches[i].reached)


def native_caches(model: Any) -> list[Any]:
    """Return the caches that the model's class itself would make, one per layer."""
    make = getattr(type(model), "make_cache", None)
    return make(model) if make else [KVCache() for _ in model.layers]
