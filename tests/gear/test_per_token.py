"""per_token: FlexGen's groups against fp64 by hand, and GEAR's terms on top of it.

The general oracle holds its every setting in test_against_oracle.py.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from gear import GearConfig, resolve
from gear.codec import compress
from gear.config import SideConfig
from gear.methods.per_token import PerToken
from tests.gear.base_cases import miss, normal
from tests.gear.oracle_cases import to_numpy


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("side", ["k", "v"])
def test_per_token_is_flexgens(side: str, bits: int) -> None:
    """Each token's groups of 64 channels by themselves: other tokens change nothing."""
    x = np.random.default_rng(1).normal(size=(1, 2, 64, 128))
    s = PerToken(GearConfig(bits=bits)).layers(1)[0]
    found = to_numpy(compress(mx.array(x.astype(np.float32)), side, s.k, s, 0).reconstruct())
    group = x.reshape(1, 2, 64, 2, 64)
    low = group.min(axis=-1, keepdims=True)
    step = (group.max(axis=-1, keepdims=True) - low) / (2**bits - 1)
    exact = (group - low) / step
    expected = np.rint(exact) * step + low
    tie = np.abs(exact - np.floor(exact) - 0.5) < 0.02  # scale and zero are stored in fp16
    off = np.abs(found.reshape(group.shape) - expected)
    assert (off <= np.where(tie, 1.02, 0.01) * step).all()
    assert np.mean(off < 0.01 * step) > 0.9


def test_per_token_is_a_method_and_a_base() -> None:
    method = PerToken(GearConfig(bits=4, k=SideConfig(base="vector", rank=3)))
    [plan] = method.plan(1)
    assert plan["k"] == plan["v"]
    assert (plan["k"]["base"], plan["k"]["rank"], plan["k"]["sparse_frac"]) == ("per_token", 0, 0.0)
    assert method.block_tokens() == 64
    assert PerToken(GearConfig(base_options={"m": 1})).plan(1)  # another base's are not its
    corrected = resolve(GearConfig(bits=4, base="per_token"), 1)[0]
    assert (corrected.k.base, corrected.k.rank, corrected.n_b) == ("per_token", 4, 64)
    x = normal(256)
    alone, gear = (
        miss(x, compress(x, "k", s.k, s, s.k.rank).reconstruct())
        for s in (method.layers(1)[0], corrected)
    )
    assert gear < 0.95 * alone
