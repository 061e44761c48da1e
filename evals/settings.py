"""A record's config as flat settings, named as the command line names them (``gear.rank``).

Layers and sides that agree share one name: ``gear.rank`` when K, V and every layer have it,
``gear.k.rank`` where K and V differ, ``0-9:4 10:8 11-29:4`` where layers differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

OF_PACKED_ATTENTION = ("eval.attention", "eval.tile_tokens")
"""Settings that only methods with packed attention have."""

OF_DOWNSTREAM = ("batch_size", "max_new_tokens", "chat_template", "system_prompt", "add_bos")
"""Settings of eval that only downstream tasks have."""

OF_WINDOWS = ("protocol", "prefill_tokens", "scored_tokens", "chunk")
"""Settings of eval that only tasks on windows of text have."""

OF_TASKS = ("num_fewshot", "metric", "lengths", "depths", "per_cell", "min_context_tokens")
"""Settings of dataset that only downstream tasks have."""

_NOT_IN_LABELS = ("model.weight_hash", "dataset.content_hash", "dataset.n_documents")
"""They follow from other settings and would only lengthen a label."""


def flatten(config: dict[str, Any]) -> dict[str, str]:
    """Return a record's config as {name: text}; what is not set has no name."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        flat |= _cache(value) if name == "cache" else _dotted({name: value})
    return flat


def _dotted(tree: dict[str, Any], prefix: str = "", *, keep_unset: bool = False) -> dict[str, str]:
    """Return the leaves of nested dicts under dotted names; None is ``null`` or left out."""
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _dotted(value, f"{prefix}{name}.", keep_unset=keep_unset)
        elif value is not None or keep_unset:
            flat[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _cache(cache: dict[str, Any]) -> dict[str, str]:
    """Return the method's settings: its options, and its layers merged into as few as say it."""
    flat = _dotted({"cache": {name: value for name, value in cache.items() if name != "layers"}})
    layers = cache.get("layers") or []
    prefix = "gear." if any("k" in layer for layer in layers) else "cache."
    leaves = [_dotted(layer, keep_unset=True) for layer in layers]  # rank=null is a setting
    for leaf in leaves:  # a reference ends with its layer and side (gear/calibration.py)
        leaf.update({n: v.partition("#")[0] for n, v in leaf.items() if n.endswith("calibration")})
    names = dict.fromkeys(name for layer in leaves for name in layer)
    merged = {name: _over_layers([layer.get(name, "null") for layer in leaves]) for name in names}
    for name, value in merged.items():
        shared = name.removeprefix("k.").removeprefix("v.")
        both = merged.get(f"k.{shared}") == merged.get(f"v.{shared}")
        flat[prefix + (shared if both else name)] = value
    return flat


def _over_layers(values: list[str]) -> str:
    """Return the one value of all layers, or each with the layers that have it."""
    runs, start = [], 0
    for value, run in groupby(values):
        end = start + len(list(run)) - 1
        runs.append((str(start) if start == end else f"{start}-{end}", value))
        start = end + 1
    return values[0] if len(runs) == 1 else " ".join(f"{where}:{value}" for where, value in runs)


def labels(configs: list[dict[str, Any]]) -> list[str]:
    """Return one label a config: the cache's name and, in brackets, what varies among them.

    Settings are compared among configs whose option in that group has the same name: that KIVI's
    rank is 0 and GEAR's 4 is what their names say, GEAR's 4 against 8 is not. How packed attention
    runs is nothing to a method without it, so there it does not differ.
    """
    flats = [flatten(config) for config in configs]
    names = [flat.get("cache.name", "?") for flat in flats]
    more = [", ".join(f"{n}={v}" for n, v in own.items()) for own in varied(flats)]
    return [f"{n} ({m})" if m else n for n, m in zip(names, more, strict=True)]


def varied(flats: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return what varies among flat configs, of each its own values, by name.

    Whose option in a group differs is not compared within it (see :func:`labels`).
    """
    found: list[dict[str, str]] = [{} for _ in flats]
    for name in dict.fromkeys(name for flat in flats for name in flat):
        if name in _NOT_IN_LABELS or name == "cache.name":
            continue
        group = _group(name)
        option = f"{group}.name"
        for index, flat in enumerate(flats):
            peers = (
                flats if name == option else [f for f in flats if f.get(option) == flat.get(option)]
            )
            if name in OF_PACKED_ATTENTION:
                peers = [f for f in peers if name in f]
            if name in flat and any(peer.get(name) != flat[name] for peer in peers):
                found[index][group if name == option else name] = flat[name]
    return found


def _group(name: str) -> str:
    """Return the config group a setting belongs to; GEAR's numbers are the cache's."""
    group = name.partition(".")[0]
    return "cache" if group == "gear" else group
