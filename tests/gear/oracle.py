"""fp64 oracle, part 2: one block X ~= base + L·R + S, every later step seeing the stored earlier.

    oracle.compress(x [heads, tokens, head_dim], side, settings, shared, rank) -> Oracle

Ambiguities of the text are decided here and nowhere else: precision is decided per row;
``clip`` shrinks both ends of a range about its centre; ``rank=None`` picks per head and the block
holds the largest. ``codes`` and ``low_rank`` may be handed in, so that a code that another program
rounded the other way at a tie, or another basis of the same subspace (both checked by the caller),
does not hide what comes after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from gear.config import LayerSettings, SideSettings
from tests.gear import oracle_bytes
from tests.gear.oracle_base import (
    Array,
    Ints,
    Mask,
    affine_codes,
    largest_mask,
    make_groups,
    near_tie,
    outlier_mask,
    raw_grid,
    store_8bit,
    store_heads,
    store_scale,
    store_zero,
)


@dataclass(frozen=True)
class Oracle:
    """One block in fp64. All arrays are [heads, tokens, head_dim] unless said otherwise."""

    codes: Array
    exact_codes: Array
    """Codes before rounding: a tie is where they lie half-way."""
    scale: Array
    """Stored scale of each entry's group."""
    doubtful: Mask
    """Entries whose stored scale or zero is a tie of its own rounding."""
    base: Array
    residual: Array
    """E: what the low-rank term sees."""
    singular: Array
    """Singular values of E, [heads, min(tokens, head_dim)]; at rank 0 its norm alone."""
    low_rank: Array
    low_rank_slack: Array
    """How far L·R moves when factor codes near a tie are rounded the other way."""
    outliers: Mask
    sparse: Array
    """S as stored."""
    outlier_step: Array
    """Step between two stored values of S where they are 8-bit, else 0."""
    reconstruction: Array
    closed_form: oracle_bytes.Block


def pick_rank(singular: Array, energy_threshold: float, max_rank: int, energy: str) -> int:
    """Return the smallest rank whose share of the energy of one head reaches the threshold."""
    weights = singular**2 if energy == "squared" else singular
    share = np.cumsum(weights) / max(weights.sum(), np.finfo(np.float64).tiny)
    reached = np.flatnonzero(share >= energy_threshold)
    return min(int(reached[0]) + 1 if reached.size else max_rank, max_rank)


def store_factor(columns: Array, bits: int) -> tuple[Array, int, Array]:
    """Store columns [heads, rank, length] as fp16/fp32, or ``bits`` a value between their ends.

    Returns values, bytes of a stored number, and how far each may move: the sign of a singular
    vector is free, and turning its grid round moves it by fp16 roundings, up to levels/1024 steps.
    """
    if bits == 16:
        stored = store_heads(columns)
        return stored.values, stored.width, np.zeros_like(columns)
    low, high = columns.min(axis=-1, keepdims=True), columns.max(axis=-1, keepdims=True)
    scale = store_scale((high - low) / (2**bits - 1))
    zero = store_heads(low)
    step = scale.values + 0 * columns
    codes, exact = affine_codes(columns, step, zero.values, 2**bits)
    turned = 2**bits / 1024
    slack = np.where(near_tie(exact, 0.02 + turned), step, turned * step)
    return codes * step + zero.values, max(scale.width, zero.width), slack


def _low_rank(
    residual: Array, rank: int | None, side: SideSettings, shared: LayerSettings
) -> tuple[Array, Array, Array, int, int, int]:
    """Return (singular values, stored L·R, slack, rank held, bytes of a number of L, of R)."""
    _, tokens, head_dim = residual.shape
    if rank == 0:
        none, norm = np.zeros_like(residual), np.linalg.norm(residual, axis=(1, 2))
        return norm[:, None], none, none, 0, 2, 2
    u, s, vt = np.linalg.svd(residual, full_matrices=False)
    if rank is None:
        picks = [pick_rank(h, shared.energy_threshold, shared.max_rank, shared.energy) for h in s]
        rank = max(picks)
    rank = min(rank, tokens, head_dim)
    root = np.sqrt(s[:, :rank])[..., None]
    left, left_width, left_tie = store_factor(root * u[..., :rank].swapaxes(1, 2), side.factor_bits)
    right, right_width, right_tie = store_factor(root * vt[:, :rank], side.factor_bits)
    slack = (
        left_tie.swapaxes(1, 2) @ (abs(right) + right_tie) + abs(left.swapaxes(1, 2)) @ right_tie
    )
    return s, left.swapaxes(1, 2) @ right, slack, rank, left_width, right_width


def _sparse(
    remainder: Array, mask: Mask, kind: str, stage: str, outlier_bits: int
) -> tuple[Array, Array, int]:
    """Return (S [heads, tokens, head_dim] as stored, its step, bytes of a stored number)."""
    values = np.where(mask, remainder, 0.0)
    if outlier_bits == 16 or not mask.any():
        stored = store_heads(values)
        return stored.values, np.zeros_like(values), stored.width
    axis = (1, 2) if stage == "post_lowrank" else 1 if kind == "k" else 2
    scale = store_scale(np.abs(values).max(axis=axis, keepdims=True) / 127)
    step = scale.values + 0 * values
    codes = np.divide(values, step, out=np.zeros_like(values), where=step != 0)
    return np.clip(np.rint(codes), -127, 127) * step, step, scale.width


class _Base(NamedTuple):
    """The base of a row: outlier places (paper order), codes, and what was stored."""

    mask: Mask
    codes: Array
    exact_codes: Array
    scale: Array
    values: Array
    doubtful: Mask
    widths: dict[str, int]


def _base(
    x: Array,
    kind: str,
    side: SideSettings,
    stage: str,
    codes: Ints | None,
    grids: Mapping[str, int],
) -> _Base:
    """Quantize x [heads, tokens, head_dim] to its stored base."""
    heads, tokens, head_dim = x.shape
    early = stage == "pre_quant"
    mask = outlier_mask(x, kind, side.sparse_frac) if early else np.zeros(x.shape, dtype=bool)
    groups = make_groups((heads, tokens, head_dim), kind, side.base, side.group_size)
    raw_scale, raw_zero, doubt = raw_grid(x, ~mask, groups, side.bits, side.base, side.clip)
    if side.scale_bits == 8:
        scales = store_8bit(raw_scale, groups.family, grids.get("scale"))
        zeros = store_8bit(raw_zero, groups.family, grids.get("zero"))
    else:
        scales = store_scale(raw_scale)
        zeros = store_zero(raw_zero, scales.values)
    scale, zero = scales.values[groups.of], zeros.values[groups.of]
    own, exact = affine_codes(x, scale, zero, 2**side.bits)
    own = np.where(mask, 0.0, own) if codes is None else codes.astype(np.float64)
    doubtful = (doubt | scales.doubtful | zeros.doubtful)[groups.of]
    widths = {"scale": scales.width, "zero": zeros.width}
    return _Base(mask, own, exact, scale, own * scale + zero, doubtful, widths)


def compress(
    x: Array,
    kind: str,
    side: SideSettings,
    shared: LayerSettings,
    rank: int | None,
    codes: Ints | None = None,
    low_rank: Array | None = None,
    grids: Mapping[str, int] = MappingProxyType({}),
) -> Oracle:
    """Compress one row x [heads, tokens, head_dim] (``kind`` 'k' or 'v') in float64.

    ``codes`` and ``low_rank`` replace the oracle's own in every later step; ``grids`` the bytes of
    the numbers that ``scale_bits=8`` keeps for "scale" and "zero".
    """
    x = np.asarray(x, dtype=np.float64)
    heads, tokens, head_dim = x.shape
    stage = shared.outlier_stage
    mask, own, exact, scale, base, doubtful, widths = _base(x, kind, side, stage, codes, grids)
    residual = np.where(mask, 0.0, x - base)
    singular, own_low_rank, slack, held, left, right = _low_rank(residual, rank, side, shared)
    seen = own_low_rank if low_rank is None else low_rank
    if stage == "post_lowrank":
        mask = largest_mask(residual - seen, side.sparse_frac)
    sparse, step, values = _sparse(x - base - seen, mask, kind, stage, side.outlier_bits)
    widths = {**widths, "left": left, "right": right, "values": values}
    closed = oracle_bytes.Block(
        kind, heads, tokens, head_dim, side.bits, side.base, side.group_size, held,
        side.sparse_frac, stage, side.factor_bits, side.outlier_bits, side.scale_bits, widths,
    )  # fmt: skip
    return Oracle(
        codes=own, exact_codes=exact, scale=scale, doubtful=doubtful, base=base, residual=residual,
        singular=singular, low_rank=own_low_rank, low_rank_slack=slack, outliers=mask,
        sparse=sparse, outlier_step=step, reconstruction=base + seen + sparse, closed_form=closed,
    )  # fmt: skip
