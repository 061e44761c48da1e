"""KIVI: the grouped base alone, K per channel and V per token (arXiv:2402.02750).

Stores codes and scales. The GEAR paper runs it with g = 64 and a residual of 64, our defaults;
KIVI's own are g = 32 with 128 recent tokens (gear.group_size=32 gear.recent=128). No calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gear.methods.family import GearFamily


@dataclass
class Kivi(GearFamily):
    """KIVI: the grouped base alone, K per channel and V per token (arXiv:2402.02750)."""

    name: ClassVar[str] = "kivi"
    switches: ClassVar[dict[str, Any]] = {
        "base": "grouped",
        "rank": 0,
        "rank_decode": 0,
        "sparse_frac": 0.0,
    }
