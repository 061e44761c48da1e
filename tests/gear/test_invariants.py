"""What must always hold of block compression, whatever the settings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from gear.block import Block
from gear.bytes import block_bytes
from gear.cache import GearCache
from gear.codec import compress
from tests.gear.oracle_base import outlier_count, outlier_mask
from tests.gear.oracle_cases import Case, make_settings, make_values, to_numpy

SIDES = pytest.mark.parametrize("side", ["k", "v"])
STAGES = pytest.mark.parametrize("stage", ["pre_quant", "post_lowrank"])
BASES = pytest.mark.parametrize("base", ["grouped", "vector", "per_token"])
SOLVERS = pytest.mark.parametrize("solver", ["power", "gram", "svd"])


def block_of(x: mx.array, side: str, rank: int = 0, **values: Any) -> Block:
    """Compress x [batch, heads, tokens, head_dim] with no outliers unless asked for."""
    shared = make_settings(**{"sparse_frac": 0.0, **values})
    return compress(x, side, shared.k if side == "k" else shared.v, shared, rank)


def error(x: mx.array, block: Block) -> float:
    """Return the Frobenius norm of what the block gets wrong."""
    return float(np.linalg.norm(to_numpy(x) - to_numpy(block.reconstruct())))


def normal(*shape: int, seed: int = 0) -> mx.array:
    """Return N(0, 1) in fp32."""
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@SIDES
@BASES
def test_no_rank_and_no_outliers_is_the_base(side: str, base: str) -> None:
    """r=0, s=0 holds nothing else, and reconstructs code · scale + zero bit for bit."""
    x = normal(2, 3, 32, 32)
    block = block_of(x, side, base=base, bits=3)
    assert set(block.arrays) == {"codes", "scale", "zero"}
    scale, zero = (np.array(block.arrays[n]).astype(np.float32) for n in ("scale", "zero"))
    codes = np.array(block.codes()).astype(np.float32)
    by_channel = side == "k" and base != "per_token"
    rows = codes.swapaxes(-1, -2) if by_channel else codes
    per_entry = 32 if base == "vector" else 16
    expected = rows * scale.repeat(per_entry, -1) + zero.repeat(per_entry, -1)
    expected = expected.swapaxes(-1, -2) if by_channel else expected
    assert np.array_equal(np.array(block.reconstruct()), expected)
    with_terms = block_of(x, side, 2, base=base, bits=3, outlier_stage="post_lowrank")
    assert all(mx.array_equal(with_terms.arrays[n], a).item() for n, a in block.arrays.items())


@SIDES
@STAGES
@BASES
@pytest.mark.parametrize("kind", ["normal", "heavy", "drift", "integers", "constant"])
@pytest.mark.parametrize("length", [24, 33])
def test_all_entries_as_outliers(side: str, stage: str, base: str, kind: str, length: int) -> None:
    """s=1 reconstructs within 2^-11 of max|X|.

    Of an odd vector the median stays in the base, and S, which is relative to it, is up to twice
    as long as X: so is its rounding. By token, the medians of several channels share a group, so
    they alone are as wrong as the base.
    """
    x = make_values(kind, (1, 2, length, length), 3)
    for rank in (0, 2):
        block = block_of(mx.array(x), side, rank, sparse_frac=1.0, outlier_stage=stage, base=base)
        miss = np.abs(to_numpy(block.reconstruct()) - x)
        if (side, stage, base) == ("k", "pre_quant", "per_token"):
            miss[0] *= outlier_mask(x[0].astype(np.float64), side, 1.0)
        worst = miss.max()
        span = np.abs(x).max() * (1 if length % 2 == 0 else 2)
        assert worst <= 2.0**-11 * span * (1 + 1e-6)


@SIDES
@SOLVERS
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_low_rank_residual_is_recovered(side: str, solver: str, rank: int) -> None:
    """Every group holds 0 and 3, so the base is the integers; the rest is an outer product."""
    rng = np.random.default_rng(rank)
    left, right = rng.normal(size=(1, 2, 64, rank)), rng.normal(size=(1, 2, rank, 48))
    left[..., ::16, :] = left[..., 1::16, :] = 0  # the ends of each group are exact
    residual = left @ right
    residual *= 0.45 / np.abs(residual).max()
    grid = rng.integers(1, 3, size=residual.shape)
    grid[..., ::16, :], grid[..., 1::16, :] = 0, 3
    x = (grid + residual).astype(np.float32)
    x = x if side == "k" else x.swapaxes(-1, -2)
    for held in (rank, rank + 3):
        block = block_of(mx.array(x), side, held, solver=solver)
        assert np.abs(to_numpy(block.reconstruct()) - x).max() <= 1e-3


@SIDES
@BASES
def test_error_never_grows_with_rank(side: str, base: str) -> None:
    for kind in ("normal", "drift", "low_rank"):
        x = mx.array(make_values(kind, (1, 2, 80, 32), 4))
        errors = [error(x, block_of(x, side, r, solver="svd", base=base)) for r in range(0, 33, 4)]
        assert all(b <= a * (1 + 1e-6) for a, b in pairwise(errors))
        assert errors[-1] < 2e-3 * errors[0]  # full rank: nothing is left but fp16


@SIDES
@pytest.mark.parametrize("rank", [0, 2])
def test_error_never_grows_with_outliers(side: str, rank: int) -> None:
    x = normal(1, 2, 70, 32)
    errors = [
        error(x, block_of(x, side, rank, sparse_frac=s, outlier_stage="post_lowrank"))
        for s in (0.0, 0.001, 0.01, 0.02, 0.1, 0.4, 0.7, 1.0)
    ]
    assert all(b <= a for a, b in pairwise(errors))
    assert errors[3] < errors[0]


@SIDES
@STAGES
@BASES
def test_permuting_heads_or_rows_permutes_the_output(side: str, stage: str, base: str) -> None:
    x = mx.array(make_values("heavy", (3, 4, 50, 32), 5))
    options = {"sparse_frac": 0.1, "outlier_stage": stage, "base": base}
    heads, rows = mx.array([2, 0, 3, 1]), mx.array([1, 2, 0])
    plain = block_of(x, side, 2, **options).reconstruct()
    by_head = block_of(x[:, heads], side, 2, **options).reconstruct()
    assert mx.array_equal(by_head, plain[:, heads]).item()
    by_row = block_of(x[rows], side, 2, **options).reconstruct()
    assert mx.array_equal(by_row, plain[rows]).item()


@SIDES
@STAGES
@pytest.mark.parametrize("compact", [False, True])
def test_batch_row_is_the_batch_of_one(side: str, stage: str, compact: bool) -> None:
    """Also where another row needs fp32 (1e5, 1e-7) and this one does not."""
    x = normal(4, 2, 48, 32).astype(mx.float32)
    x = x * mx.array([1.0, 1e5, 1e-7, 3.0])[:, None, None, None]
    options: dict[str, Any] = {"sparse_frac": 0.1, "outlier_stage": stage}
    if compact:
        options.update(factor_bits=8, outlier_bits=8, scale_bits=8)
    whole = block_of(x, side, 2, **options)
    for row in range(4):
        alone = block_of(x[row : row + 1], side, 2, **options)
        assert mx.array_equal(whole.codes()[row], alone.codes()[0]).item()
        assert mx.array_equal(whole.reconstruct()[row], alone.reconstruct()[0]).item()


@SIDES
@pytest.mark.parametrize("kind", ["normal", "heavy", "low_rank"])
def test_power_iteration_is_close_to_the_svd(side: str, kind: str) -> None:
    """‖E - LR‖ ≤ 1.05 of the SVD's: the same base, so the error of the whole is that of L·R."""
    for shape in ((1, 4, 64, 64), (1, 2, 64, 128), (1, 2, 300, 80), (1, 3, 20, 64)):
        x = mx.array(make_values(kind, shape, 6))
        for rank in (1, 2, 4, 8):
            power, svd = (
                np.linalg.norm(
                    to_numpy(x)
                    - to_numpy(block_of(x, side, rank, base="vector", solver=s).reconstruct()),
                    axis=(-1, -2),
                )
                for s in ("power", "svd")
            )
            assert (power <= 1.05 * svd).all(), (shape, rank)


@pytest.mark.parametrize("rank", [1, 4, 8, 32, 64])
@pytest.mark.parametrize("real_rank", [0, 1, 2, 3, 6, 20, 40])
def test_power_iteration_on_fewer_directions_than_the_rank(rank: int, real_rank: int) -> None:
    """A residual of lower rank than asked for (most channels constant) leaves nothing undefined."""
    x = np.array(normal(1, 2, 64, 64))
    x[..., real_rank:] = 7
    found = to_numpy(block_of(mx.array(x), "k", rank).reconstruct())
    base = to_numpy(block_of(mx.array(x), "k").reconstruct())
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - x) <= (1e-2 if rank >= real_rank else 1) * np.linalg.norm(
        base - x
    )


@pytest.mark.parametrize("token_by_token", [True, False])
def test_streaming_equals_the_blocks_compressed_directly(token_by_token: bool) -> None:
    shared = make_settings(n_b=32)
    keys, values = normal(1, 2, 96, 32, seed=7), normal(1, 2, 96, 32, seed=8)
    cache, step = GearCache(shared), 1 if token_by_token else 32
    for start in range(0, 96, step):
        cache.update_and_fetch(keys[:, :, start : start + step], values[:, :, start : start + step])
    cache.flush()
    for x, side, held in zip((keys, values), "kv", cache.reconstruct(), strict=True):
        settings = shared.k if side == "k" else shared.v
        blocks = [
            compress(x[:, :, n : n + 32], side, settings, shared, settings.rank_decode)
            for n in range(0, 96, 32)
        ]
        direct = mx.concatenate([b.reconstruct(x.dtype) for b in blocks], axis=2)
        assert mx.array_equal(direct, held).item()


def _places(block: Block) -> NDArray[np.int64]:
    outliers = block.outliers()
    return np.zeros((0,), int) if outliers is None else np.array(outliers[0])


@pytest.mark.parametrize("frac", [0.02, 0.25, 1.0])
def test_outlier_count_is_the_formula(frac: float) -> None:
    """At every N: 2k of each channel (paper), int(s·N·D) of a head (port), all places distinct."""
    for tokens in (*range(1, 80), 99, 100, 101, 149, 150, 256, 257, 1024):
        x = normal(1, 1, tokens, 3)
        places = _places(block_of(x, "k", sparse_frac=frac))
        k = outlier_count(frac, tokens)
        assert places.size == 3 * 2 * k
        assert (np.diff(places.reshape(3, -1).astype(int), axis=1) > 0).all()
        values = _places(block_of(x.swapaxes(-1, -2), "v", sparse_frac=frac))
        assert np.array_equal(values, places)
        flat = _places(block_of(x, "k", sparse_frac=frac, outlier_stage="post_lowrank"))
        assert flat.size == np.unique(flat).size == int(frac * tokens * 3)


@SIDES
@BASES
@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_two_to_the_bits(side: str, base: str, bits: int) -> None:
    x = normal(1, 1, 256, 256)
    block = block_of(x, side, base=base, bits=bits, group_size=256)
    assert np.unique(np.array(block.codes())).tolist() == list(range(2**bits))
    row = np.array(block.reconstruct())[0, 0]
    line = row[:, 0] if side == "k" and base != "per_token" else row[0]
    ramp = np.linspace(-1, 1, 512, dtype=np.float32)
    ramp = ramp.reshape((1, 1, 1, 512) if base == "per_token" else (1, 1, 512, 1))
    full = block_of(mx.array(ramp), "k", base=base, bits=bits, group_size=512)
    assert len(np.unique(np.array(full.reconstruct()))) == 2**bits
    assert len(np.unique(line)) <= 2**bits


@SIDES
@STAGES
@BASES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_constant_groups_are_finite_and_exact(side: str, stage: str, base: str, dtype: str) -> None:
    for value in (0.0, 7.1, -3e-5, 1000.1):
        x = mx.full((1, 2, 40, 32), value).astype(getattr(mx, dtype))
        for frac, rank in ((0.0, 0), (0.1, 2), (1.0, 4)):
            block = block_of(x, side, rank, sparse_frac=frac, outlier_stage=stage, base=base)
            found = block.reconstruct(x.dtype)
            assert mx.isfinite(found).all().item()
            if frac == 0:
                assert mx.array_equal(found, x).item()
            assert np.allclose(to_numpy(found), to_numpy(x), rtol=2.0**-11, atol=0)


@SIDES
@STAGES
@BASES
def test_bytes_held_are_the_bytes_accounted(side: str, stage: str, base: str) -> None:
    """At every N, multiples of the group or not, for every cheaper form."""
    forms = [(16, 16, 16), (8, 8, 8), (4, 8, 16)]
    for index, tokens in enumerate((*range(3, 40), 63, 64, 65, 127, 200, 257)):
        factor, outlier, scale = forms[index % 3]
        shared = make_settings(
            base=base, outlier_stage=stage, sparse_frac=0.1, factor_bits=factor,
            outlier_bits=outlier, scale_bits=scale,
        )  # fmt: skip
        x = (30 * normal(2, 2, tokens, 20, seed=tokens)).astype(mx.float16)  # every term fits fp16
        block = compress(x, side, shared.k, shared, 1)
        size = block_bytes(side, shared.k, stage, 2, tokens, 20, 1)
        assert block.nbytes == 2 * size, tokens
        assert block.rank == 1


@SIDES
@STAGES
@pytest.mark.parametrize("form", [(16, 16, 16), (8, 8, 8), (4, 8, 16)])
@pytest.mark.parametrize("shape", [(1, 2, 48, 32), (1, 2, 1, 32), (1, 2, 48, 1)])
def test_error_scales_with_the_data(
    side: str, stage: str, form: tuple[int, int, int], shape: tuple[int, int, int, int]
) -> None:
    """Data of scale 1e-9 has the relative error of scale 1."""
    factor, outlier, scale = form
    case = Case(
        side,
        make_settings(
            sparse_frac=0.1, outlier_stage=stage, factor_bits=factor, outlier_bits=outlier,
            scale_bits=scale, bits=4,
        ),
        2, "normal", "float32", shape, 9,
    )  # fmt: skip
    x = case.array()
    relative = []
    for unit in (1.0, 1e-9):
        block = compress(x * unit, side, case.settings, case.shared, 2)
        relative.append(error(x * unit, block) / float(np.linalg.norm(to_numpy(x * unit))))
    assert relative[1] <= 1.02 * relative[0] + 1e-3
