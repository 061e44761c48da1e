"""per_token: min/max codes, K and V per token in groups of channels (as FlexGen, arXiv:2303.06865).

    scale = (max - min) / (2^b - 1),  zero = min  of group_size channels of one token and head

Stored: packed codes, scale and zero of every group, in blocks of n_b tokens like GEAR's other
bases; FlexGen compresses each token as it comes and keeps no exact buffer. No calibration. It is
the "per-token" row of the GEAR paper's tables (g = 64), and what keys suffer under: their few
channels of large values stretch every token's range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gear.grids import Grid
from gear.methods.family import GearFamily


class PerTokenBase(Grid):
    """`Grid` with K by token; everything else is the same."""

    name: ClassVar[str] = "per_token"


@dataclass
class PerToken(GearFamily):
    """Min/max codes alone, K and V per token in groups of channels."""

    name: ClassVar[str] = "per_token"
    switches: ClassVar[dict[str, Any]] = {
        "base": "per_token",
        "rank": 0,
        "rank_decode": 0,
        "sparse_frac": 0.0,
    }
