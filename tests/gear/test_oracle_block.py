"""The oracle against numbers worked out by hand: whole blocks, ranks and the closed byte form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gear.config import GearConfig, LayerSettings, resolve
from tests.gear import oracle, oracle_bytes


def settings(**values: Any) -> LayerSettings:
    return resolve(GearConfig(**values), 1)[0]


def test_block_by_hand() -> None:
    """Channel 0 1 2 3 100 and four more: -100 and 100 go to S, the rest is on a 2-bit grid."""
    x = np.array([0.0, 1, 2, 3, 100, 0.4, -100, 2.6]).reshape(1, 8, 1)
    s = settings(group_size=8, n_b=8, sparse_frac=0.25, rank=0)
    block = oracle.compress(x, "k", s.k, s, 0)
    assert block.codes.ravel().tolist() == [0, 1, 2, 3, 0, 0, 0, 3]
    assert block.base.ravel().tolist() == [0, 1, 2, 3, 0, 0, 0, 3]
    assert block.residual.ravel() == pytest.approx([0, 0, 0, 0, 0, 0.4, 0, -0.4])
    assert block.reconstruction.ravel().tolist() == [0, 1, 2, 3, 100, 0, -100, 3]
    assert oracle_bytes.terms(block.closed_form) == {
        "codes": 4,
        "scales": 4,
        "lowrank": 0,
        "outliers": 6,
    }
    ported = settings(group_size=8, n_b=8, sparse_frac=0.25, outlier_stage="post_lowrank")
    block = oracle.compress(x, "k", ported.k, ported, 0)
    scale = float(np.float16(200 / 3))
    assert block.codes.ravel().tolist() == [1, 2, 2, 2, 3, 2, 0, 2]
    assert scale == 66.6875  # so that -100 + 2·scale = 33.375 and E = -33.3125 ... -32.975
    assert block.outliers.ravel().nonzero()[0].tolist() == [0, 5]  # int(0.25·8) = 2 largest
    assert block.reconstruction[0, :, 0][[0, 5]] == pytest.approx([0, 0.4], abs=0.02)
    assert block.reconstruction[0, 4, 0] == 3 * scale - 100


def test_rank_one_remainder_is_taken_by_the_low_rank_term() -> None:
    """At 1 bit 0, ±0.25 and 1 round to 0, 0, 0, 1: what is left is one outer product."""
    x = np.array([[0, 0, 0.25], [0, 1, 1], [1, 0, 0.0]])[None]
    s = settings(bits=1, group_size=3, n_b=3, sparse_frac=0, rank=1)
    block = oracle.compress(x, "k", s.k, s, 1)
    assert np.abs(block.residual).sum() == 0.25
    assert block.reconstruction == pytest.approx(x, abs=1e-3)
    assert oracle_bytes.lowrank_bytes(block.closed_form) == 2 * (3 + 3)


def test_rank_from_energy() -> None:
    """Singular values 3 2 1: squared shares 9/14 13/14 1, plain shares 1/2 5/6 1."""
    s = np.array([3.0, 2, 1])
    assert [oracle.pick_rank(s, t, 9, "squared") for t in (0.5, 0.65, 0.93, 1.0)] == [1, 2, 3, 3]
    assert [oracle.pick_rank(s, t, 9, "nuclear") for t in (0.5, 0.8, 0.9)] == [1, 2, 3]
    assert oracle.pick_rank(s, 0.99, 2, "squared") == 2


def test_factors_and_outliers_in_fewer_bits() -> None:
    columns = np.array([[[0.0, 1, 2.6, 15]]])
    assert oracle.store_factor(columns, 4)[0].ravel().tolist() == [0, 1, 3, 15]
    remainder = np.array([[[127.0, -3.4, 50, 9]]])
    mask = np.array([[[True, True, False, False]]])
    held, step, width = oracle._sparse(remainder, mask, "v", "pre_quant", 8)
    assert held.ravel().tolist() == [127, -3, 0, 0]
    assert (step[0, 0, 0], width) == (1.0, 2)


@pytest.mark.parametrize("values", [[-1e5, 0, 1, 2], [1e-9, 2e-9, 3e-9, 5e-9], [7.1] * 4])
def test_values_that_fp16_cannot_hold_are_kept(values: list[float]) -> None:
    x = np.array(values).reshape(1, 4, 1)
    s = settings(bits=8, group_size=4, n_b=4, sparse_frac=0, rank=0)
    block = oracle.compress(x, "k", s.k, s, 0)
    assert 4 in block.closed_form.widths.values()
    assert np.abs(block.reconstruction - x).max() <= np.abs(x).max() / 255 / 2 + 1e-6 * abs(x).max()


def _block(side: str, **changes: Any) -> oracle_bytes.Block:
    values: dict[str, Any] = {
        "side": side, "heads": 1, "tokens": 64, "head_dim": 128, "bits": 2, "base": "grouped",
        "group_size": 64, "rank": 2, "sparse_frac": 0.02, "outlier_stage": "pre_quant",
    }  # fmt: skip
    return oracle_bytes.Block(**{**values, **changes})


def test_bytes_of_the_paper_blocks() -> None:
    """D=128: 2b g64 s=2% n_b=64 r=2 is 25.0% (K) and 22.7% (V) of fp16, KCVT 40.0% and 51.6%."""
    fp16 = 2 * 64 * 128
    assert oracle_bytes.terms(_block("k")) == {
        "codes": 2048, "scales": 512, "lowrank": 768, "outliers": 768,
    }  # fmt: skip
    assert oracle_bytes.accounted(_block("k")) / fp16 == 0.25
    assert oracle_bytes.accounted(_block("v")) / fp16 == pytest.approx(0.2266, abs=1e-4)
    kcvt = _block("k", tokens=20, bits=4, base="vector", rank=0)
    assert oracle_bytes.accounted(kcvt) / (2 * 20 * 128) == 0.4
    kcvt = _block("k", tokens=20, bits=4, base="vector")
    assert oracle_bytes.accounted(kcvt) / (2 * 20 * 128) == pytest.approx(0.516, abs=4e-4)


@pytest.mark.parametrize(
    ("side", "changes", "term", "value"),
    [
        ("k", {"tokens": 65}, "codes", 128 * 4 * 5),
        ("k", {"tokens": 65}, "scales", 128 * 4 * 2),
        ("v", {"base": "vector", "heads": 3}, "scales", 4 * 64),
        ("v", {"base": "vector", "heads": 3, "scale_bits": 8}, "scales", 2 * 64 + 8),
        ("v", {"scale_bits": 8, "heads": 3}, "scales", 3 * 2 * (2 * 64 + 8)),
        ("k", {"scale_bits": 8, "tokens": 65}, "scales", 2 * (2 * 128 + 8)),
        ("k", {"factor_bits": 4, "tokens": 65}, "lowrank", 4 * 2 * (9 + 16) + 8 * 2),
        ("v", {"factor_bits": 8}, "lowrank", 4 * 2 * (16 + 32) + 8 * 2),
        ("k", {"outlier_bits": 8}, "outliers", 2 * 128 * (1 + 1) + 2 * 128),
        ("v", {"outlier_bits": 8}, "outliers", 2 * 64 * (1 + 1) + 2 * 64),
        ("k", {"tokens": 257}, "outliers", 6 * 128 * (2 + 2)),
        ("k", {"outlier_stage": "post_lowrank"}, "outliers", 163 * (2 + 2)),
        ("k", {"outlier_stage": "post_lowrank", "outlier_bits": 8}, "outliers", 163 * 3 + 2),
        ("k", {"outlier_stage": "post_lowrank", "tokens": 513}, "outliers", 1313 * (2 + 4)),
        ("k", {"widths": {**oracle_bytes.HALF, "zero": 4}}, "scales", 128 * (2 + 4)),
    ],
)
def test_bytes_by_hand(side: str, changes: dict[str, Any], term: str, value: int) -> None:
    assert oracle_bytes.terms(_block(side, **changes))[term] == value
