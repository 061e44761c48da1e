"""This package's side: a method's cache, filled by one prefill and flushed."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from comparison.data import SEED, Sample
from comparison.found import Found, bits, held_bytes, relative_error
from gear.bases import load_base
from gear.cache import GearCache
from gear.config import GearConfig
from gear.entropy import codes_by_channel, encode
from gear.methods import METHODS, load_method
from gear.segments import accounted_bytes


def measure(method: str, options: dict[str, Any], gear: dict[str, Any], sample: Sample) -> Found:
    """Return what ``method`` makes of a sample; ``gear`` are GEAR's numbers that it may set.

    Of ``options``, ``layer`` (i, n) is the layer it stands for, and ``coded`` asks for the bytes
    of an arithmetic coder.
    """
    own = {name: value for name, value in options.items() if name not in ("layer", "coded")}
    kind = load_method(METHODS[method])
    if kind.uses_gear:
        own["settings"] = GearConfig(**gear)
    with TemporaryDirectory() as folder:
        if "calibration" in own:
            own["calibration"] = _calibrated(Path(folder), kind, own, sample)
        cache = kind(**own).make_cache(*options.get("layer", (0, 1)))
        if getattr(cache, "query_window", 0):
            cache.observe(sample.queries)
        cache.update_and_fetch(*sample.exact)
        cache.flush()
        rebuilt = cache.reconstruct()
        mx.eval(rebuilt)
        sizes = _sides(cache, bool(options.get("coded")))
        held = bits(held_bytes(cache), sample, 2)
    k_error, v_error = map(relative_error, sample.exact, rebuilt)
    return Found(k_error, v_error, bits(sizes[0], sample), bits(sizes[1], sample), held)


def _sides(cache: Any, coded: bool) -> tuple[float, float]:
    """Return the counted bytes of K and of V, exact tokens at 2 bytes an element."""
    if not isinstance(cache, GearCache):
        return cache.cache_bytes().stored / 2, cache.cache_bytes().stored / 2
    exact = cache.sinks.elements + cache.buffer.elements
    sizes = []
    for side in ("k", "v"):
        blocks = [getattr(segment, side) for segment in cache.segments]
        stage = cache.settings.outlier_stage
        size = exact + sum(accounted_bytes(block, stage, cache.heads) for block in blocks)
        if coded:
            size -= sum(block.arrays["codes"].nbytes for block in blocks)
            size += encode(codes_by_channel(blocks), blocks[0].settings.bits).nbytes
        sizes.append(size)
    return sizes[0], sizes[1]


def _calibrated(folder: Path, kind: type[Any], own: dict[str, Any], sample: Sample) -> str:
    """Return a file of what the method's base fits on the sample's other text."""
    empty, made, found = folder / "none.safetensors", folder / "made.safetensors", {}
    mx.save_safetensors(str(empty), {})
    settings = kind(**own | {"calibration": str(empty)}).layers(1)[0]
    for side, s, x in zip("kv", (settings.k, settings.v), sample.other, strict=True):
        base: Any = load_base(s.base)
        for name, tensor in base.fit(side, x, s, SEED).items():
            found[f"0.{side}.{name}"] = tensor
    mx.save_safetensors(str(made), found)
    return str(made)
