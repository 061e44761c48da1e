"""GEAR-L: base + low rank, no outliers (arXiv:2403.05527).

Stores codes, scales and L·R; S is left out. No calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gear.methods.family import GearFamily


@dataclass
class GearL(GearFamily):
    """GEAR-L: base + low rank, no outliers (arXiv:2403.05527)."""

    name: ClassVar[str] = "gear_l"
    switches: ClassVar[dict[str, Any]] = {"sparse_frac": 0.0}
