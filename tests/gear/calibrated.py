"""Calibration files for methods that need one: fitted on seeded values, once a process."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from gear import GearConfig, resolve
from gear.bases import BASES, load_base
from gear.checks import SettingError

LAYERS = 2


def needs_file(base: str) -> bool:
    """Say whether a base's settings must name a calibration file."""
    if base not in BASES:
        return False
    try:
        resolve(GearConfig(base=base), 1)
    except SettingError as error:
        return "calibration" in str(error)
    return False


def _values(tokens: int, seed: int) -> mx.array:
    """Return N(0, 1) [1, 2, tokens, 64]."""
    return mx.array(np.random.default_rng(seed).normal(size=(1, 2, tokens, 64)).astype(np.float32))


@lru_cache(maxsize=8)
def calibration_file(base: str) -> str:
    """Return a file with the tensors of ``base`` for two layers of two heads of 64 channels."""
    folder = Path(tempfile.mkdtemp())
    empty = folder / "empty.safetensors"
    mx.save_safetensors(str(empty), {"none": mx.zeros(1)})
    options: dict[str, Any] = {"calibration": str(empty)}
    [layer] = resolve(GearConfig(base=base, base_options=options), 1)
    found = {}
    for number in range(LAYERS):
        for i, (side, s) in enumerate((("k", layer.k), ("v", layer.v))):
            values = _values((256, 512)[i], 2 * number + i)
            fitted = load_base(base).fit(side, values, s, number)  # type: ignore[attr-defined]
            found |= {f"{number}.{side}.{name}": array for name, array in fitted.items()}
    file = folder / f"{base}.safetensors"
    mx.save_safetensors(str(file), found)
    return str(file)
