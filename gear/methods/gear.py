"""GEAR: base + low rank + outliers (arXiv:2403.05527).

All three terms are stored packed; nothing is left out and no calibration is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gear.methods.family import GearFamily


@dataclass
class Gear(GearFamily):
    """GEAR: base + low rank + outliers (arXiv:2403.05527)."""

    name: ClassVar[str] = "gear"
    switches: ClassVar[dict[str, Any]] = {}
