"""KCVT: one scale per channel (K) and per token over all heads (V) (arXiv:2403.05527).

Stores codes and scales of blocks of n_b = 20 tokens. Meant for 4 bits. No calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gear.methods.family import GearFamily


@dataclass
class Kcvt(GearFamily):
    """KCVT: one scale per channel (K) and per token over all heads (V) (arXiv:2403.05527)."""

    name: ClassVar[str] = "kcvt"
    switches: ClassVar[dict[str, Any]] = {
        "base": "vector",
        "rank": 0,
        "rank_decode": 0,
        "sparse_frac": 0.0,
    }
