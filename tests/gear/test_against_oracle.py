"""Block compression against the fp64 oracle, step by step.

Each step is compared given what the code under test held before it, so that a code rounded the
other way at a tie, or another basis of a low-rank subspace, does not pass for (or hide) an error:
codes; then L·R of their residual; then S and the sum; then the bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from gear.block import Block
from gear.bytes import block_bytes, block_terms
from tests.gear import oracle, oracle_bytes
from tests.gear.oracle_base import (
    CLIP_FACTORS,
    Array,
    group_errors,
    make_groups,
    near_tie,
    outlier_mask,
    raw_grid,
)
from tests.gear.oracle_cases import KINDS, Case, cases, make_settings, to_numpy

FACTOR_NOISE = {16: 2e-3, 8: 0.03, 4: 0.4}
"""Relative error that storing L and R may add, by factor_bits."""
GRIDS = ("scale", "zero")
few = settings(
    max_examples=10, deadline=None, phases=[Phase.generate], derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


class Bounds(NamedTuple):
    """Tolerances of a head: ``close`` is 1e-3 of its range, ``rounding`` what fp32 may lose."""

    close: Array
    rounding: Array

    @classmethod
    def of(cls, x: Array) -> Bounds:
        """Return the bounds of x [heads, tokens, head_dim], each [heads, 1, 1]."""
        rounding = np.full((*x.shape[:-2], 1, 1), 2e-7 * np.abs(x).max())  # heads may share a grid
        return cls(1e-3 * np.ptp(x, axis=(-2, -1), keepdims=True) + 5 * rounding, rounding)


def check_codes(codes: Array, expected: oracle.Oracle, bounds: Bounds) -> None:
    """Codes are equal, except within 1e-4 of a tie; an outlier's code is 0.

    An 8-bit zero is itself the result of fp32 arithmetic, which adds its rounding.
    """
    within = np.full(codes.shape, 1e-4)
    if expected.closed_form.scale_bits == 8:
        within = within + bounds.rounding / np.where(expected.scale > 0, expected.scale, np.inf)
    wrong = (codes != expected.codes) & ~expected.doubtful
    assert not (wrong & ~near_tie(expected.exact_codes, within)).any()
    assert (np.abs(codes - expected.codes) <= 1 + within)[wrong].all()


def check_low_rank(found: Array, expected: oracle.Oracle, case: Case, bounds: Bounds) -> None:
    """L·R is the SVD's where that is unique (reference solvers), else within 1.05 of its error.

    Power iteration at more than an eighth of the full rank keeps nearly all there is, and one
    direction mistaken for its neighbour weighs more: 1.25 there.
    """
    norm = np.linalg.norm(expected.residual, axis=(1, 2))
    rank = expected.closed_form.rank
    best = np.sqrt((expected.singular[:, rank:] ** 2).sum(axis=1))
    error = np.linalg.norm(expected.residual - found, axis=(1, 2))
    rounding = bounds.rounding[:, 0, 0] * np.sqrt(found[0].size)
    rounding += bounds.close[:, 0, 0] * np.sqrt(expected.doubtful.sum(axis=(1, 2)))
    real = (expected.singular > 1e-3 * expected.singular[:, :1]).sum(axis=1)
    near_full = (case.shared.solver == "power") & (8 * rank > real)
    noise = FACTOR_NOISE[case.settings.factor_bits] * norm + rounding
    assert (error <= np.where(near_full, 1.25, 1.05) * best + noise).all()
    if case.shared.solver == "power":
        return
    s = np.pad(expected.singular, ((0, 0), (0, 1)))
    cuts = slice(rank - 1, rank) if case.settings.factor_bits == 16 else slice(0, rank)
    gaps = (s[:, :-1] - s[:, 1:])[:, cuts]
    unique = (gaps > 5e-3 * s[:, :1]).all(axis=1)
    unique &= np.abs(expected.residual).max(axis=(1, 2)) > 1e3 * bounds.rounding[:, 0, 0]
    close = np.abs(found - expected.low_rank) <= bounds.close + 1.1 * expected.low_rank_slack
    assert close[unique].all()


def check_sum(
    found: Array, expected: oracle.Oracle, x: Array, low_rank: Array, bounds: Bounds
) -> None:
    """Base + L·R + S is within 1e-3 of the range; a tie of magnitudes may go to either place."""
    rest, step = x - expected.base - low_rank, expected.outlier_step
    unit = np.where(step > 0, step, 1)
    doubt = near_tie(rest / unit, 0.08 + bounds.rounding / unit)
    slack = bounds.close + np.where(doubt, step, 0) + np.where(step > 0, np.abs(rest) / 1024, 0)
    close = np.abs(found - expected.reconstruction) <= slack
    if expected.closed_form.outlier_stage == "post_lowrank" and expected.outliers.any():
        size = np.abs(rest)
        edge = np.where(expected.outliers, size, np.inf).min(axis=(1, 2), keepdims=True)
        other = np.where(expected.outliers, x - rest, x)
        tied = np.abs(size - edge) <= 0.1 * bounds.close
        close |= tied & (np.abs(found - other) <= bounds.close + step.max())
    assert close.all()


def is_noise(x: Array, bounds: Bounds) -> bool:
    """Whether a head of x [heads, tokens, head_dim] is nonzero and nothing but fp32 rounding."""
    peak = np.abs(x).max(axis=(1, 2))
    return bool(((peak > 0) & (peak < 10 * bounds.rounding.max())).any())


def check_bytes(block: Block, rows: list[oracle.Oracle], bounds: Bounds) -> None:
    """The arrays held are the closed form, in the precision of the row that needs most of it.

    Precision is taken as held where the text does not rule it (the grids of 8- and 4-bit terms),
    and where a residual is nothing but fp32 rounding.
    """
    forms = [row.closed_form for row in rows]
    noise = {term: any(is_noise(t, bounds) for t in tensors) for term, tensors in (
        ("left", [r.residual for r in rows]), ("right", [r.residual for r in rows]),
        ("values", [r.sparse for r in rows]),
    )}  # fmt: skip
    widths = {term: max(form.widths[term] for form in forms) for term in forms[0].widths}
    for term, grid, array in (
        ("scale", "scale_grid", None), ("zero", "zero_grid", None),
        ("left", "left_grid", "left"), ("right", "right_grid", "right"),
        ("values", "outlier_scale", "outlier_value"),
    ):  # fmt: skip
        name = grid if grid in block.arrays else array if noise.get(term) else None
        if name in block.arrays:
            widths[term] = block.arrays[name].dtype.size
    expected = oracle_bytes.terms(replace(forms[0], widths=widths))
    assert block.terms() == {term: len(rows) * size for term, size in expected.items()}
    assert block.rank == forms[0].rank


def check(case: Case) -> None:
    """Compare one block, row by row, with the oracle."""
    block = case.compress()
    x, codes, found = to_numpy(case.array()), np.array(block.codes()), to_numpy(block.reconstruct())
    factors, rows = block.low_rank(), list[oracle.Oracle]()
    low_rank = np.zeros_like(x)
    if factors is not None:
        low_rank = (to_numpy(factors[0]).swapaxes(-1, -2) @ to_numpy(factors[1]))[:, :, 0]
    for row in range(len(x)):
        alone = case.compress(rows=slice(row, row + 1)).arrays if len(x) > 1 else block.arrays
        grids = {
            t: alone[f"{t}_grid"].dtype.size for t in ("scale", "zero") if f"{t}_grid" in alone
        }
        args = (x[row], case.side, case.settings, case.shared)
        first = oracle.compress(*args, rank=0, grids=grids)
        if case.settings.base == "affine_mlx":  # the other of two quite different grids
            assume(not ((codes[row] != first.codes) & first.doubtful).any())
        if case.settings.scale_bits == 8:  # a whole step of the scale, not a last place
            assume(not first.doubtful.any())
        bounds = Bounds.of(x[row])
        check_codes(codes[row], first, bounds)
        held = {"codes": codes[row], "low_rank": low_rank[row], "grids": grids}
        rows.append(oracle.compress(*args, rank=case.rank, **held))
        check_low_rank(low_rank[row], rows[row], case, bounds)
        check_sum(found[row], rows[row], x[row], low_rank[row], bounds)
    check_bytes(block, rows, Bounds.of(x))


@pytest.mark.parametrize("solver", ["power", "gram", "svd"])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("stage", ["pre_quant", "post_lowrank"])
@pytest.mark.parametrize("base", ["grouped", "vector", "affine_mlx", "per_token"])
@few
@given(data=st.data())
def test_blocks(base: str, stage: str, side: str, solver: str, data: st.DataObject) -> None:
    check(data.draw(cases(base, stage, side, solver)))


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("base", ["grouped", "vector", "per_token"])
@pytest.mark.parametrize("sparse_frac", [0.0, 0.1])
@few
@given(
    bits=st.integers(1, 4), group=st.sampled_from([12, 16, 64]), tokens=st.integers(1, 90),
    kind=st.sampled_from(KINDS[:4]), seed=st.integers(0, 999),
)  # fmt: skip
def test_clip(
    side: str, base: str, sparse_frac: float, bits: int, group: int, tokens: int, kind: str,
    seed: int,
) -> None:  # fmt: skip
    """Each group's squared error is that of the best of the nine factors (its outliers apart)."""
    shared = make_settings(
        bits=bits, group_size=group, base=base, rank=0, sparse_frac=sparse_frac, clip=True
    )
    case = Case(side, shared, 0, kind, "float32", (1, 2, tokens, 24), seed)
    x, found = to_numpy(case.array())[0], to_numpy(case.compress().reconstruct())[0]
    keep = ~outlier_mask(x, side, sparse_frac)
    groups = make_groups((2, tokens, 24), side, base, group)
    best = np.min([group_errors(x, keep, groups, bits, f) for f in CLIP_FACTORS], axis=0)
    error = np.bincount(groups.of[keep], (found - x)[keep] ** 2, minlength=len(best))
    count = np.bincount(groups.of[keep], minlength=len(best))
    scale, _, _ = raw_grid(x, keep, groups, bits, base, clip=False)
    rounding = 1e-3 * np.ptp(x)  # of the stored scale and zero, times the step it is added to
    assert np.all(np.abs(error - best) <= 0.02 * best + count * rounding * (scale + rounding))


@pytest.mark.parametrize("energy", ["squared", "nuclear"])
@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("solver", ["svd", "gram"])
def test_rank_by_energy(energy: str, threshold: float, solver: str) -> None:
    """rank=null: the block holds the largest rank that one of its heads needs, up to max_rank."""
    for max_rank, seed in ((3, 0), (16, 1), (16, 2)):
        shared = make_settings(
            rank=None, energy=energy, energy_threshold=threshold, max_rank=max_rank, solver=solver
        )
        case = Case("v", shared, None, "low_rank", "float32", (1, 2, 48, 32), seed)
        check(case)
        assert 1 <= case.compress().rank <= max_rank


@given(
    side=st.sampled_from("kv"), heads=st.integers(1, 8), tokens=st.integers(1, 300),
    head_dim=st.sampled_from([1, 64, 80, 128, 256, 300]), rank=st.integers(0, 40),
    bits=st.integers(1, 8), base=st.sampled_from(["grouped", "vector", "per_token"]),
    group=st.sampled_from([1, 7, 32, 64, 128]), frac=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    stage=st.sampled_from(["pre_quant", "post_lowrank"]), factor=st.sampled_from([16, 8, 4]),
    outlier=st.sampled_from([16, 8]), scale=st.sampled_from([16, 8]),
)  # fmt: skip
@settings(few, max_examples=300)
def test_accounted_bytes(
    side: str, heads: int, tokens: int, head_dim: int, rank: int, bits: int, base: str,
    group: int, frac: float, stage: str, factor: int, outlier: int, scale: int,
) -> None:  # fmt: skip
    """The accounting that needs no arrays is the closed form, at every N and every setting."""
    shared = make_settings(
        bits=bits, base=base, group_size=group, sparse_frac=frac, outlier_stage=stage,
        factor_bits=factor, outlier_bits=outlier, scale_bits=scale,
    )  # fmt: skip
    held = min(rank, tokens, head_dim)
    form = oracle_bytes.Block(
        side, heads, tokens, head_dim, bits, base, group, held, frac, stage, factor, outlier, scale
    )
    args = (side, shared.k, stage, heads, tokens, head_dim, rank)
    assert block_terms(*args) == oracle_bytes.terms(form)
    assert block_bytes(*args) == oracle_bytes.accounted(form)
