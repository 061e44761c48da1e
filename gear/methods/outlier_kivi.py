"""Outlier-reduced KIVI: base + outliers, no low rank (the GEAR paper's ablation).

Stores codes, scales and S; L·R is left out. No calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gear.methods.family import GearFamily


@dataclass
class OutlierKivi(GearFamily):
    """Outlier-reduced KIVI: base + outliers, no low rank (the GEAR paper's ablation)."""

    name: ClassVar[str] = "outlier_kivi"
    switches: ClassVar[dict[str, Any]] = {"rank": 0, "rank_decode": 0}
