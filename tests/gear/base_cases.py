"""Settings and values for the tests of bases, the trial base among them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from gear import GearConfig, resolve
from gear.config import LayerSettings
from tests.gear.calibrated import calibration_file, needs_file
from tests.gear.oracle_cases import to_numpy

TRIAL = "tests.gear.trial_base.Trial"
OWN: dict[str, dict[str, Any]] = {
    "trial": {"bits": 1},
    "cachegen": {"base_options": {"tokens": 8}},
    "palu": {"base_options": {"most": 0.25}},
}
"""Settings that a base cannot do without; the others are tested at 2 bits."""


def settings(base: str, **values: Any) -> LayerSettings:
    """Return settings of two terms beside ``base``, at blocks of 64 tokens."""
    file = {"base_options": {"calibration": calibration_file(base)}} if needs_file(base) else {}
    values = {"n_b": 64, "bits": 2, **file, **OWN.get(base, {}), **values}
    return resolve(GearConfig(base=base, allow_larger_than_fp16=True, **values), 1)[0]


def normal(tokens: int, seed: int = 0, rows: int = 1) -> mx.array:
    """Return [rows, 2, tokens, 64] in fp32, one channel large, as keys have them."""
    x = np.random.default_rng(seed).normal(size=(rows, 2, tokens, 64)).astype(np.float32)
    x[..., 5] = 8 + 2 * x[..., 5]
    return mx.array(x)


def miss(x: mx.array, found: mx.array) -> float:
    """Return the relative error of ``found``."""
    return float(np.linalg.norm(to_numpy(x - found)) / np.linalg.norm(to_numpy(x)))
