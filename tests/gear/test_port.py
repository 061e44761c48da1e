"""The port's function surface: names and defaults, formulas in fp64 NumPy, bytes."""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

import gear
from gear import GEARState, port

FUNCTIONS = {
    "quantize_base": "(x, bits, group_size=32, axis='token')",
    "residual": "(x, base_recon)",
    "lowrank_error": "(E, rank, energy_threshold=0.9)",
    "sparse_outliers": "(resid, frac)",
    "sparse_outliers_batched": "(resid, frac)",
    "gear_compress": "(x, bits=2, rank=None, sparse_frac=0.01, group_size=32, "
    "energy_threshold=0.9, base_axis='token')",
    "gear_reconstruct": "(state, base=None)",
    "gear_reconstruct_batched": "(base, L, R, sp_idx, sp_val, out_dtype=mlx.core.float16)",
    "gear_quant_dequant": "(x, bits=2, rank=None, sparse_frac=0.01, group_size=32, "
    "energy_threshold=0.9, base_axis='token')",
    "gear_bytes": "(state)",
    "base_only_bytes": "(state)",
}
AXES = ["channel", "token"]

Array = NDArray[np.float64]


def _x(tokens: int, head_dim: int = 48, seed: int = 0) -> mx.array:
    return mx.random.normal((tokens, head_dim), key=mx.random.key(seed))


def _np(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32), dtype=np.float64)


def _grid(x: Array, bits: int, group: int, axis: str) -> tuple[Array, Array]:
    """Return the unrounded scale and zero of every entry of x [N, D]."""
    rows = x if axis == "token" else x.T
    scale, zero = np.zeros_like(rows), np.zeros_like(rows)
    for start in range(0, rows.shape[1], group):
        span = np.s_[:, start : start + group]
        zero[span] = rows[span].min(axis=1, keepdims=True)
        scale[span] = (rows[span].max(axis=1, keepdims=True) - zero[span]) / (2**bits - 1)
    return (scale, zero) if axis == "token" else (scale.T, zero.T)


def _per_entry(stream: port.CodeStream, name: str, axis: str) -> Array:
    """Return codes, scale or zero of a stream as [N, D]."""
    part = _np(getattr(stream, name))
    groups, group, width = stream.codes.shape
    flat = np.broadcast_to(part, (groups, group, width)).reshape(-1, width)[: stream.n_rows]
    return flat if axis == "channel" else flat.T


def _by_hand(x: Array, base: Array, rank: int, frac: float) -> Array:
    """Return base + L·R + S in fp64: truncated SVD, then the largest of what is left."""
    u, s, vt = np.linalg.svd(x - base, full_matrices=False)
    out = base + (u[:, :rank] * s[:rank]) @ vt[:rank]
    rest = (x - out).ravel()
    top = np.argsort(-np.abs(rest), kind="stable")[: int(x.size * frac)]
    flat = out.ravel()
    flat[top] += rest[top]
    return flat.reshape(x.shape)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_the_ports(name: str) -> None:
    signature = inspect.signature(getattr(gear, name))
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(plain)) == FUNCTIONS[name]


def test_a_state_holds_the_ports_fields_and_its_dtype() -> None:
    assert GEARState._fields == (
        "codes", "scale", "zero", "L", "R", "sp_idx", "sp_val",
        "n_rows", "bits", "rank", "axis", "d_cols", "dtype",
    )  # fmt: skip


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("tokens", [5, 64, 100])
def test_the_base_is_min_max_codes(tokens: int, bits: int, axis: str) -> None:
    x = _x(tokens)
    stream, recon = port.quantize_base(x, bits, 32, axis)
    codes, scale, zero = (_per_entry(stream, n, axis) for n in ("codes", "scale", "zero"))
    for stored, exact in zip((scale, zero), _grid(_np(x), bits, 32, axis), strict=True):
        assert np.allclose(stored, exact, rtol=2**-11 + 1e-6)
    steps = (_np(x) - zero) / scale
    sure = np.abs(steps - np.floor(steps) - 0.5) > 1e-4
    assert np.array_equal(codes[sure], np.clip(np.round(steps), 0, 2**bits - 1)[sure])
    assert np.abs(_np(recon) - (codes * scale + zero)).max() < 1e-5
    assert codes.max() == 2**bits - 1
    assert codes.min() == 0


@pytest.mark.parametrize(("axis", "groups", "width"), [("channel", 4, 48), ("token", 2, 100)])
def test_what_each_axis_groups(axis: str, groups: int, width: int) -> None:
    stream, recon = port.quantize_base(_x(100), 2, 32, axis)
    assert stream.codes.shape == (groups, 32, width)
    assert stream.scale.shape == stream.zero.shape == (groups, 1, width)
    assert recon.shape == (100, 48)
    assert (stream.n_rows, stream.bits) == (100 if axis == "channel" else 48, 2)


def test_channels_are_the_tokens_of_the_transpose() -> None:
    x = _x(64)
    _, by_channel = port.quantize_base(x, 3, 16, "channel")
    _, by_token = port.quantize_base(x.T, 3, 16, "token")
    assert mx.array_equal(by_channel, by_token.T)
    assert not mx.allclose(by_channel, port.quantize_base(x, 3, 16, "token")[1], atol=1e-2)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("rank", [0, 1, 4])
@pytest.mark.parametrize("frac", [0.0, 0.02])
@pytest.mark.parametrize("tokens", [70, 96])
def test_all_three_terms_follow_the_formulas(
    tokens: int, rank: int, frac: float, axis: str
) -> None:
    x = _x(tokens)
    state = port.gear_compress(x, 2, rank, frac, 32, base_axis=axis)
    base = port.quantize_base(x, 2, 32, axis)[1]
    expected = _by_hand(_np(x), _np(base), rank, frac)
    got = _np(port.gear_reconstruct(state))
    assert np.abs(got - expected).max() < 1e-3 * np.ptp(_np(x))
    assert mx.array_equal(port.gear_reconstruct(state, base=base), port.gear_reconstruct(state))
    assert mx.array_equal(
        port.gear_quant_dequant(x, 2, rank, frac, 32, base_axis=axis), port.gear_reconstruct(state)
    )
    assert (state.n_rows, state.d_cols, state.axis) == (tokens, 48, axis)


def test_no_low_rank_and_no_outliers_is_the_base_bit_for_bit() -> None:
    x = _x(70)
    state = port.gear_compress(x, 2, rank=0, sparse_frac=0)
    assert (state.L, state.R, state.sp_idx, state.sp_val, state.rank) == (None,) * 4 + (0,)
    assert mx.array_equal(port.gear_reconstruct(state), port.quantize_base(x, 2)[1])
    assert port.gear_bytes(state) == port.base_only_bytes(state)


def test_every_entry_an_outlier_is_nearly_exact() -> None:
    x = _x(70)
    miss = _np(port.gear_quant_dequant(x, 2, rank=0, sparse_frac=1) - x)
    assert np.abs(miss).max() <= 2**-11 * np.abs(_np(x)).max()


def test_low_rank_is_u_s_and_v() -> None:
    e = _x(60, 40)
    left, right = port.lowrank_error(e, 5)
    assert left is not None
    assert right is not None
    singular = np.linalg.svd(_np(e), compute_uv=False)
    assert np.allclose(_np(right) @ _np(right).T, np.eye(5), atol=1e-5)
    assert np.allclose(np.linalg.norm(_np(left), axis=0), singular[:5], rtol=1e-5)
    miss = np.linalg.norm(_np(e) - _np(left) @ _np(right))
    assert miss == pytest.approx(np.linalg.norm(singular[5:]), rel=1e-5)


def test_an_exactly_low_rank_residual_is_recovered() -> None:
    e = _x(64, 5) @ _x(5, 48, seed=1)
    left, right = port.lowrank_error(e, 5)
    assert left is not None
    assert right is not None
    assert np.abs(_np(left @ right - e)).max() < 1e-4


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.9, 0.99, 1.0])
def test_rank_none_counts_the_plain_sum(threshold: float) -> None:
    e = _x(64)
    share = np.cumsum(np.linalg.svd(_np(e), compute_uv=False))
    expected = int(np.argmax(share >= threshold * share[-1] - 1e-9)) + 1
    left, _ = port.lowrank_error(e, None, threshold)
    assert left is not None
    assert abs(left.shape[1] - expected) <= (0 if threshold < 1 else 1)
    state = port.gear_compress(e, rank=None, energy_threshold=threshold)
    assert state.L is not None
    assert state.rank == state.L.shape[1]


def test_a_zero_residual_has_rank_one_of_zeros() -> None:
    left, right = port.lowrank_error(mx.zeros((8, 6)), None)
    assert left is not None
    assert right is not None
    assert left.shape == (8, 1)
    assert not mx.any(left @ right).item()
    assert port.lowrank_error(mx.zeros((8, 6)), 0) == (None, None)


def test_a_rank_beyond_the_head_is_clamped_and_recorded() -> None:
    state = port.gear_compress(_x(16, 64), rank=1000)
    assert state.rank == 16
    assert state.L is not None
    assert state.L.shape == (16, 16)


@pytest.mark.parametrize(("shape", "frac"), [((100, 80), 0.011), ((10, 10), 0.03), ((7, 9), 0.5)])
def test_outliers_are_the_largest_and_counted_as_n_d_frac(
    shape: tuple[int, int], frac: float
) -> None:
    resid = _x(*shape)
    index, values = port.sparse_outliers(resid, frac)
    assert index is not None
    assert values is not None
    flat, count = _np(resid).ravel(), int(shape[0] * shape[1] * frac)
    assert (index.dtype, values.dtype) == (mx.int32, mx.float16)
    assert np.array_equal(np.array(index), np.sort(np.argsort(-np.abs(flat))[:count]))
    assert np.allclose(_np(values), flat[np.array(index)], rtol=2**-11)


def test_of_equal_magnitudes_the_first_are_taken() -> None:
    index, values = port.sparse_outliers(mx.array([[1.0, -2.0, 2.0], [2.0, -2.0, 0.0]]), 0.5)
    assert index is not None
    assert values is not None
    assert index.tolist() == [1, 2, 3]
    assert values.tolist() == [-2, 2, 2]


@pytest.mark.parametrize("frac", [0.0, 0.0001])
def test_no_outlier_is_none(frac: float) -> None:
    assert port.sparse_outliers(_x(8), frac) == (None, None)
    assert port.sparse_outliers_batched(_x(8)[None], frac) == (None, None)


def test_batched_forms_are_the_single_ones_side_by_side() -> None:
    heads = [_x(40, seed=s) * 10.0**s for s in range(3)]
    states: Any = [port.gear_compress(x, rank=2, sparse_frac=0.05) for x in heads]
    bases = mx.stack([port.quantize_base(x, 2)[1] for x in heads])
    factors: Any = [
        mx.stack([getattr(s, name) for s in states]).astype(mx.float32) for name in "LR"
    ]
    rests = mx.stack(heads) - bases - factors[0] @ factors[1]
    sparse: Any = port.sparse_outliers_batched(rests, 0.05)
    for i, state in enumerate(states):
        assert mx.array_equal(sparse[0][i], state.sp_idx)
        assert mx.allclose(sparse[1][i], state.sp_val, rtol=1e-3)
    together = port.gear_reconstruct_batched(bases, *factors, *sparse)
    assert together.dtype == mx.float16
    for i, state in enumerate(states):
        assert mx.allclose(together[i], port.gear_reconstruct(state), rtol=2e-3, atol=2e-3 * 10**i)
    alone = port.gear_reconstruct_batched(bases, None, None, None, None, out_dtype=mx.float32)
    assert mx.array_equal(alone, bases)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("tokens", "head_dim"), [(128, 128), (100, 48), (1000, 64)])
def test_bytes_are_the_documented_ones(tokens: int, head_dim: int, axis: str) -> None:
    state = port.gear_compress(_x(tokens, head_dim), 3, 8, 0.005, 32, base_axis=axis)
    grouped, width = (tokens, head_dim) if axis == "channel" else (head_dim, tokens)
    base = -(-tokens * head_dim * 3 // 8) + 2 * 2 * -(-grouped // 32) * width
    assert port.base_only_bytes(state) == base
    count = int(tokens * head_dim * 0.005)
    assert port.gear_bytes(state) == base + 2 * 8 * (tokens + head_dim) + 6 * count


def test_a_term_in_fp32_is_counted_so() -> None:
    wide = port.gear_compress(_x(64) * 1e6, rank=2, sparse_frac=0)
    narrow = port.gear_compress(_x(64), rank=2, sparse_frac=0)
    assert wide.scale.dtype == wide.zero.dtype == mx.float32
    assert port.base_only_bytes(wide) - port.base_only_bytes(narrow) == 4 * 2 * 64


def test_one_token_alone_costs_more_than_fp16_and_a_thousand_less() -> None:
    one = port.gear_compress(_x(1, 128), rank=1, base_axis="channel")
    assert port.gear_bytes(one) > 2 * 128
    many = port.gear_compress(_x(1024, 128), rank=4, sparse_frac=0.005, base_axis="channel")
    assert port.gear_bytes(many) < 0.25 * 2 * 1024 * 128
