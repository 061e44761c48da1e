"""The function surface of VeloxQuant-MLX's ``gear`` method: one head [N, D], the port's order.

    X ~= base + L·R + S:  base = grouped min/max codes,  L·R = truncated SVD of E = X - base,
    S = the int(N·D·frac) entries of largest |E - L·R|

Names, defaults and meanings are the port's; the arithmetic is this package's. Against the port:
bad input is an error, a constant group is exact, the last group may be short, a term that fp16
would lose is fp32 (precision.py) and counted so, and the result has the input's dtype. The
factorisation is the full one, on the CPU; the cache (cache.py) has the fast solver.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from gear.config import check_fraction, check_integer, check_one_of
from gear.errors import NonFiniteError
from gear.outliers import Rows, largest_places
from gear.precision import (
    Store,
    cast,
    narrowed,
    scale_needs_fp32,
    values_need_fp32,
    zero_needs_fp32,
)
from gear.quantize import encode, min_max

AXES = ("channel", "token")


class CodeStream(NamedTuple):
    """The base of one head. W is D for axis "channel" and N for "token" (groups along the other).

    A short last group is filled up with code 0.
    """

    codes: mx.array
    """uint8 [groups, group_size, W]"""
    scale: mx.array
    """fp16 or fp32 [groups, 1, W]"""
    zero: mx.array
    """fp16 or fp32 [groups, 1, W]"""
    n_rows: int
    """Entries along the grouped axis, filling not counted."""
    bits: int


class GEARState(NamedTuple):
    """One compressed head [n_rows, d_cols]; codes, scale and zero as in `CodeStream`."""

    codes: mx.array
    scale: mx.array
    zero: mx.array
    L: mx.array | None
    """[n_rows, rank], or None"""
    R: mx.array | None
    """[rank, d_cols], or None"""
    sp_idx: mx.array | None
    """int32 [nnz], ascending places in the flattened [n_rows, d_cols], or None"""
    sp_val: mx.array | None
    """[nnz], what base + L·R lacks there, or None"""
    n_rows: int
    bits: int
    rank: int
    """The rank really stored: clamped to min(N, D), picked by energy, or 0."""
    axis: str = "token"
    d_cols: int = 0
    dtype: mx.Dtype = mx.float16
    """dtype of the compressed input, and so of the reconstruction."""


def _check(x: mx.array, name: str, ndim: int) -> None:
    """Refuse what is no floating-point [N, D] (or [BH, N, D]) array of finite entries."""
    if not isinstance(x, mx.array) or x.ndim != ndim or not mx.issubdtype(x.dtype, mx.floating):
        got = f"{x.dtype} {x.shape}" if isinstance(x, mx.array) else type(x).__name__
        form = "one head [N, D]" if ndim == 2 else "heads [BH, N, D]"
        raise ValueError(f"{name}: must be a floating-point mx.array of {form}; got {got}.")
    if x.size and not mx.isfinite(x).all().item():
        heads = x.reshape(1, -1, *x.shape[-2:])
        raise NonFiniteError.found(heads, name, -1)


def _check_rank(rank: int | None, energy_threshold: float) -> None:
    """Refuse settings of L·R that are out of range."""
    if rank is not None:
        check_integer("rank", rank, 0)
    check_fraction("energy_threshold", energy_threshold)


def quantize_base(
    x: mx.array, bits: int, group_size: int = 32, axis: str = "token"
) -> tuple[CodeStream, mx.array]:
    """Quantize x [N, D]; return the stream (codes, scale, zero) and its reconstruction [N, D].

    ``axis="channel"``: groups along tokens, one scale per channel (K); ``"token"``: groups along
    channels, one per token (V). Errors: ``ValueError`` naming the argument; `NonFiniteError`.
    """
    _check(x, "x", 2)
    check_integer("bits", bits, 1, 8)
    check_integer("group_size", group_size, 1)
    check_one_of("axis", axis, AXES)
    exact = x.astype(mx.float32)
    rows = (exact.T if axis == "channel" else exact)[None, None]  # groups along the last axis
    width, length = rows.shape[2:]
    groups = -(-length // group_size)
    if x.size:
        scale, zero = min_max(Rows(rows), group_size, bits, clip=False)
    else:
        scale = zero = mx.zeros((1, 1, width, groups))
    store = Store()
    scale = store.add("scale", scale, scale_needs_fp32(scale))
    zero = store.add("zero", zero, zero_needs_fp32(zero, scale))
    codes = encode(rows, scale, zero, bits, group_size)[0, 0].T
    codes = mx.pad(codes, [(0, groups * group_size - length), (0, 0)])
    store.add("codes", codes.reshape(groups, group_size, width), None)
    arrays = narrowed(store.arrays, store.narrow, store.wide)
    scale, zero = (arrays[name][0, 0].T[:, None, :] for name in ("scale", "zero"))
    stream = CodeStream(arrays["codes"], scale, zero, length, bits)
    return stream, cast(_dequantize(stream, axis), x.dtype)


def _dequantize(stream: CodeStream, axis: str) -> mx.array:
    """Return the fp32 base [N, D] of a stream."""
    scale, zero = stream.scale.astype(mx.float32), stream.zero.astype(mx.float32)
    flat = (stream.codes.astype(mx.float32) * scale + zero).flatten(0, 1)[: stream.n_rows]
    return cast(flat if axis == "channel" else flat.T, mx.float32)


def residual(x: mx.array, base_recon: mx.array) -> mx.array:
    """Return E = x - base_recon in fp32. Errors: ``ValueError`` for shapes that differ."""
    if x.shape != base_recon.shape:
        raise ValueError(
            f"base_recon: must have the shape of x, {x.shape}; got {base_recon.shape}."
        )
    return x.astype(mx.float32) - base_recon.astype(mx.float32)


def lowrank_error(
    E: mx.array, rank: int | None, energy_threshold: float = 0.9
) -> tuple[mx.array | None, mx.array | None]:
    """Return fp32 L = U·s [N, r] and R = Vᵀ [r, D] of the residual E [N, D], by the full SVD.

    ``rank`` is clamped to min(N, D); 0 gives (None, None). ``rank=None`` takes the fewest singular
    values whose plain sum reaches ``energy_threshold`` of all (1 for E = 0). Errors: ``ValueError``
    naming the argument; `NonFiniteError`, before anything reaches LAPACK.
    """
    _check(E, "E", 2)
    _check_rank(rank, energy_threshold)
    if rank == 0 or not E.size:
        return None, None
    u, s, vt = mx.linalg.svd(E.astype(mx.float32), stream=mx.cpu)
    if rank is None:
        reached = np.cumsum(np.array(s, dtype=np.float64))
        rank = int(np.argmax(reached >= energy_threshold * reached[-1])) + 1
    rank = min(rank, *E.shape)
    return u[:, :rank] * s[:rank], vt[:rank]


def sparse_outliers(resid: mx.array, frac: float) -> tuple[mx.array | None, mx.array | None]:
    """Return places (int32 [nnz], ascending, flattened) and values of the largest |resid| [N, D].

    nnz = int(N·D·frac); none gives (None, None). Of equal magnitudes the first in order are taken;
    values are fp16, or fp32 where fp16 would lose them. Errors as in `lowrank_error`.
    """
    _check(resid, "resid", 2)
    index, value = sparse_outliers_batched(resid[None], frac)
    return (None, None) if index is None or value is None else (index[0], value[0])


def sparse_outliers_batched(
    resid: mx.array, frac: float
) -> tuple[mx.array | None, mx.array | None]:
    """Return places and values [BH, nnz] by head of resid [BH, N, D], as `sparse_outliers` does."""
    _check(resid, "resid", 3)
    check_fraction("frac", frac, "2% is written 0.02.")
    count = int(resid.shape[1] * resid.shape[2] * frac)
    if not count or not resid.size:
        return None, None
    flat = resid.astype(mx.float32).flatten(1)
    index = largest_places(flat, count)
    values = mx.take_along_axis(flat, index, axis=-1)[:, None]
    store = Store()
    store.add("values", values, values_need_fp32(values))
    return index.astype(mx.int32), narrowed(store.arrays, store.narrow, store.wide)["values"][:, 0]


def gear_compress(
    x: mx.array,
    bits: int = 2,
    rank: int | None = None,
    sparse_frac: float = 0.01,
    group_size: int = 32,
    energy_threshold: float = 0.9,
    base_axis: str = "token",
) -> GEARState:
    """Compress one head x [N, D]: base, low rank of what it leaves, outliers of what both leave.

    Every step sees the stored form of the earlier ones. Errors: ``ValueError`` naming the
    argument; `NonFiniteError`.
    """
    _check(x, "x", 2)
    check_fraction("sparse_frac", sparse_frac, "2% is written 0.02.")
    _check_rank(rank, energy_threshold)
    check_one_of("base_axis", base_axis, AXES)
    exact = x.astype(mx.float32)
    stream, base = quantize_base(exact, bits, group_size, base_axis)
    rest = residual(exact, base)
    left, right = lowrank_error(rest, rank, energy_threshold)
    if left is not None and right is not None:
        store = Store()
        for name, factor in (("L", left[None, None]), ("R", right[None, None])):
            store.add(name, factor, values_need_fp32(factor))
        factors = narrowed(store.arrays, store.narrow, store.wide)
        left, right = factors["L"][0, 0], factors["R"][0, 0]
        rest = rest - left.astype(mx.float32) @ right.astype(mx.float32)
    index, values = sparse_outliers(rest, sparse_frac)
    return GEARState(
        codes=stream.codes, scale=stream.scale, zero=stream.zero, L=left, R=right,
        sp_idx=index, sp_val=values, n_rows=x.shape[0], bits=bits,
        rank=0 if left is None else left.shape[1],
        axis=base_axis, d_cols=x.shape[1], dtype=x.dtype,
    )  # fmt: skip


def gear_reconstruct(state: GEARState, base: mx.array | None = None) -> mx.array:
    """Return base + L·R + S [n_rows, d_cols] in the dtype of what was compressed.

    ``base`` [n_rows, d_cols] is the base alone where the caller has it already.
    """
    if base is None:
        length = state.n_rows if state.axis == "channel" else state.d_cols
        stream = CodeStream(state.codes, state.scale, state.zero, length, state.bits)
        base = _dequantize(stream, state.axis)
    terms = (state.L, state.R, state.sp_idx, state.sp_val)
    heads = (None if term is None else term[None] for term in terms)
    return gear_reconstruct_batched(base[None], *heads, out_dtype=state.dtype)[0]


def gear_reconstruct_batched(
    base: mx.array,
    L: mx.array | None,
    R: mx.array | None,
    sp_idx: mx.array | None,
    sp_val: mx.array | None,
    out_dtype: mx.Dtype = mx.float16,
) -> mx.array:
    """Return base + L·R + S [BH, N, D] of ``out_dtype``.

    base [BH, N, D]; L [BH, N, r], R [BH, r, D]; sp_idx, sp_val [BH, nnz]; a term may be None.
    """
    out = base.astype(mx.float32)
    if L is not None and R is not None:
        out = out + L.astype(mx.float32) @ R.astype(mx.float32)
    if sp_idx is not None and sp_val is not None:
        flat = out.flatten(1)
        values = mx.take_along_axis(flat, sp_idx, axis=-1) + sp_val.astype(mx.float32)
        out = mx.put_along_axis(flat, sp_idx, values, axis=-1).reshape(out.shape)
    return cast(out, out_dtype)


def gear_quant_dequant(
    x: mx.array,
    bits: int = 2,
    rank: int | None = None,
    sparse_frac: float = 0.01,
    group_size: int = 32,
    energy_threshold: float = 0.9,
    base_axis: str = "token",
) -> mx.array:
    """Return x [N, D] compressed and reconstructed; see `gear_compress`."""
    return gear_reconstruct(
        gear_compress(x, bits, rank, sparse_frac, group_size, energy_threshold, base_axis)
    )


def base_only_bytes(state: GEARState) -> int:
    """Return the bytes of the base: codes packed at ``bits`` each, scale and zero as stored."""
    codes = -(-state.n_rows * state.d_cols * state.bits // 8)
    return codes + state.scale.nbytes + state.zero.nbytes


def gear_bytes(state: GEARState) -> int:
    """Return the bytes of all three terms: 6 an outlier (int32 place, fp16 value), fp16 L and R.

    What precision.py keeps in fp32 counts as fp32.
    """
    terms = (state.L, state.R, state.sp_idx, state.sp_val)
    return base_only_bytes(state) + sum(term.nbytes for term in terms if term is not None)
