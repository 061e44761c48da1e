"""A GearCache as one flat list, for mlx-lm's `save_prompt_cache`: [version, JSON, arrays…].

mlx-lm drops nested empty containers and rounds floats to fp32, so every scalar travels in one
JSON string and every array at the list's top level, in the order that the JSON tells.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from gear.block import Block
from gear.config import LayerSettings, SideSettings
from gear.exact_tokens import ExactTokens
from gear.segments import Segment

if TYPE_CHECKING:
    from gear.cache import GearCache

STATE_VERSION = 1


def dump(cache: GearCache) -> list[Any]:
    """Return the whole state of ``cache`` as [version, JSON, arrays…]."""
    arrays: list[mx.array] = []

    def block(b: Block) -> dict[str, Any]:
        arrays.extend(b.arrays.values())
        usual = b.settings == getattr(cache.settings, b.side)
        own = {} if usual else {"settings": b.settings.as_dict()}
        return own | {
            "tokens": b.tokens, "head_dim": b.head_dim, "rank": b.rank, "count": b.count,
            "arrays": list(b.arrays),
        }  # fmt: skip

    def exact(tokens: ExactTokens) -> int:
        arrays.extend(tokens.arrays)
        return len(tokens.arrays)

    scalars = {
        "settings": cache.settings.as_dict(), "layer": cache.layer, "heads": cache.heads,
        "dtype": cache.dtype_name, "prefill": cache.prefill,
        "sinks": exact(cache.sinks), "buffer": exact(cache.buffer),
        "segments": [
            {"k": block(s.k), "v": block(s.v), "valid": s.valid, "grows": s.grows,
             "prefill": s.prefill}
            for s in cache.segments
        ],
    }  # fmt: skip
    return [STATE_VERSION, json.dumps(scalars), *arrays]


def restore(cache: GearCache, state: list[Any]) -> None:
    """Fill ``cache`` (made without ``__init__``) from what `dump` returned.

    Errors: ``ValueError`` for a state of another version.
    """
    if state[0] != STATE_VERSION:
        raise ValueError(
            f"GEAR cache state version {state[0]!r}: this package reads {STATE_VERSION}; "
            "make the cache again with this version."
        )
    scalars = json.loads(state[1])
    arrays: Iterator[mx.array] = iter(state[2:])
    cache.settings = _settings(scalars["settings"])
    cache.layer, cache.heads = scalars["layer"], scalars["heads"]
    cache.dtype_name, cache.prefill = scalars["dtype"], scalars["prefill"]
    cache.sinks, cache.buffer = ExactTokens(), ExactTokens()
    cache.sinks.arrays = [next(arrays) for _ in range(scalars["sinks"])]
    cache.buffer.arrays = [next(arrays) for _ in range(scalars["buffer"])]

    def block(side: str, saved: dict[str, Any]) -> Block:
        names = saved.pop("arrays")
        own = saved.pop("settings", None)
        settings: SideSettings = SideSettings.of(own) if own else getattr(cache.settings, side)
        held = {name: next(arrays) for name in names}
        return Block(side=side, settings=settings, arrays=held, **saved)

    cache.segments = [
        Segment(
            block("k", s["k"]), block("v", s["v"]),
            valid=s["valid"], grows=s["grows"], prefill=s["prefill"],
        )
        for s in scalars["segments"]
    ]  # fmt: skip


def _settings(saved: dict[str, Any]) -> LayerSettings:
    """Rebuild the settings of a layer from plain values."""
    sides = {side: SideSettings.of(saved.pop(side)) for side in ("k", "v")}
    return LayerSettings(**sides, **saved)


def load_prompt_cache(file_name: str | Path, return_metadata: bool = False) -> Any:
    """Load what mlx-lm's `save_prompt_cache` wrote, GEAR caches included.

    mlx-lm looks cache classes up in its own module only; they are shown to it for this one call.
    """
    from gear.age_tiers import AgeTieredCache, BatchAgeTieredCache
    from gear.batch import BatchGearCache
    from gear.cache import GearCache
    from gear.evicting import EvictingCache
    from gear.exact import ExactCache
    from gear.mlx_quantized import MlxQuantizedCache
    from gear.port_cache import BatchPortCache, PortCache

    classes = (
        GearCache, BatchGearCache, PortCache, BatchPortCache, ExactCache, MlxQuantizedCache,
        AgeTieredCache, BatchAgeTieredCache, EvictingCache,
    )  # fmt: skip
    ours = {c.__name__: c for c in classes}
    with patch.dict(vars(mlx_lm_cache), ours):
        return mlx_lm_cache.load_prompt_cache(str(file_name), return_metadata)
