"""Inputs that break other implementations, and what each must get: a value kept, or an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gear.cache import GearCache
from gear.codec import compress
from gear.config import GearConfig, SettingError, SideConfig, resolve
from gear.errors import NonFiniteError
from tests.gear.oracle_cases import make_settings, to_numpy

ROOT = Path(__file__).parents[2]
SIDES = pytest.mark.parametrize("side", ["k", "v"])
STAGES = pytest.mark.parametrize("stage", ["pre_quant", "post_lowrank"])
SOLVERS = pytest.mark.parametrize("solver", ["power", "gram", "svd"])
FORMS = pytest.mark.parametrize("bits_of_terms", [16, 8])


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def read_back(x: mx.array, side: str, rank: int, **values: Any) -> np.ndarray[Any, Any]:
    """Compress and reconstruct in x's own dtype."""
    shared = make_settings(**values)
    block = compress(x, side, shared.k if side == "k" else shared.v, shared, rank)
    found = block.reconstruct(x.dtype)
    assert found.dtype == x.dtype
    assert found.shape == x.shape
    return to_numpy(found)


@pytest.mark.fault
@SIDES
@STAGES
@SOLVERS
@FORMS
@pytest.mark.parametrize("sparse_frac", [0.0, 0.05])
def test_one_huge_entry_is_kept(
    side: str, stage: str, solver: str, bits_of_terms: int, sparse_frac: float
) -> None:
    """1e5 in a 64x64 fp32 head at rank 2: fp16 would overflow; nothing may become inf."""
    for huge in (1e5, -1e5):
        x = normal(1, 2, 64, 64)
        x[0, 1, 10, 20] = huge
        found = read_back(
            mx.array(x), side, 2, outlier_stage=stage, solver=solver, sparse_frac=sparse_frac,
            outlier_bits=bits_of_terms, scale_bits=bits_of_terms,
        )  # fmt: skip
        assert np.isfinite(found).all()
        tolerance = 1e-3 if bits_of_terms == 16 else 0.01
        assert abs(found[0, 1, 10, 20] - huge) <= tolerance * abs(huge)
        assert np.abs(found[0, 0] - x[0, 0]).max() < 2  # the other head is untouched


@SIDES
@STAGES
def test_bfloat16_beyond_the_range_of_float16(side: str, stage: str) -> None:
    """7e4 is finite in bf16 and not in fp16."""
    x = normal(1, 2, 64, 32)
    x[0, 0, 5, 6] = 7e4
    for frac in (0.0, 0.05):
        found = read_back(
            mx.array(x).astype(mx.bfloat16), side, 2, outlier_stage=stage, sparse_frac=frac
        )
        assert np.isfinite(found).all()
        assert abs(found[0, 0, 5, 6] - 7e4) <= 2.0**-8 * 7e4


_NEAR_THE_END_OF_FLOAT32 = """
import sys
import mlx.core as mx
import numpy as np
from gear.codec import compress
from gear.errors import NonFiniteError
from tests.gear.oracle_cases import make_settings

for huge in (1e38, 2e38, 3.4e38):
    x = np.random.default_rng(0).normal(size=(1, 1, 32, 32)).astype(np.float32)
    x[0, 0, 3, 4], x[0, 0, 3, 5], x[0, 0, 9, 4] = huge, -huge, -huge
    for side in "kv":
        for bits in (1, 2, 8):
            shared = make_settings(solver=sys.argv[1], sparse_frac=0.0, bits=bits)
            try:
                block = compress(mx.array(x), side, shared.k, shared, 2)
            except NonFiniteError:
                continue
            found = np.array(block.reconstruct())
            assert np.isfinite(found).all()
            assert abs(found[0, 0, 3, 4] / huge - 1) <= 1e-2
print("alive")
"""


@SOLVERS
def test_ranges_that_overflow_float32(solver: str) -> None:
    """max - min is inf in fp32 although every value is finite: kept or refused, never inf.

    In a process of its own: inf inside LAPACK ends one with exit code 0.
    """
    command = [sys.executable, "-c", _NEAR_THE_END_OF_FLOAT32, solver]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # noqa: S603
    assert (done.stdout, done.returncode) == ("alive\n", 0), done.stderr[-2000:]


@pytest.mark.fault
@SIDES
@SOLVERS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_non_finite_values_are_refused(side: str, solver: str, bad: float, dtype: mx.Dtype) -> None:
    x = normal(2, 3, 20, 16)
    x[1, 2, 3, 4] = x[1, 2, 7, 8] = bad
    shared = make_settings(solver=solver)
    with pytest.raises(NonFiniteError, match="layer 5") as caught:
        compress(mx.array(x).astype(dtype), side, shared.k, shared, 2, layer=5)
    found = caught.value
    assert (found.side, found.layer, found.head, found.count) == (side, 5, 2, 2)
    assert isinstance(found, ValueError)


@pytest.mark.parametrize("value", [1.5, -1, 2, float("nan"), float("inf"), "0.02", True])
@pytest.mark.parametrize("where", ["", "k.", "v."])
def test_sparse_frac_out_of_range(value: Any, where: str) -> None:
    config = GearConfig()
    (config.k if where == "k." else config.v if where else config).sparse_frac = value
    with pytest.raises(SettingError, match=r"\[0, 1\].*2% is written 0\.02") as caught:
        resolve(config, 2)
    assert caught.value.name == f"gear.{where}sparse_frac"
    assert caught.value.value is value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", -3), ("rank", 2.5), ("rank", "4"), ("rank", True), ("rank_decode", -1),
        ("bits", 0), ("bits", 2.5), ("bits", 9), ("bits", "4"), ("bits", True),
        ("group_size", 0), ("group_size", -32), ("group_size", 32.0), ("n_b", 0), ("n_b", 100),
        ("base", "group"), ("factor_bits", 6), ("outlier_bits", 4), ("scale_bits", 4),
        ("clip", "false"), ("clip", 1), ("max_rank", 0), ("energy", "l2"), ("energy_threshold", 2),
        ("solver", "qr"), ("iterations", 0), ("seed", -1), ("outlier_stage", "first"),
        ("n_sink", -1), ("recent", "8"), ("attend", "port"), ("allow_larger_than_fp16", "false"),
    ],
)  # fmt: skip
def test_settings_out_of_range_or_of_the_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=name) as caught:
        resolve(GearConfig(**{name: value}), 1)
    assert repr(value) in str(caught.value)
    assert "must be" in str(caught.value)


def test_unknown_settings_are_errors() -> None:
    """Of no method, or of another one."""
    for name in ("group", "residual_length"):
        with pytest.raises(TypeError, match=name):
            GearConfig(**{name: 32})
    with pytest.raises(TypeError, match="n_b"):
        SideConfig(**{"n_b": 32})


@SIDES
@SOLVERS
def test_rank_beyond_the_block_is_clamped_and_recorded(side: str, solver: str) -> None:
    x = mx.array(normal(1, 2, 16, 64))
    shared = make_settings(solver=solver, sparse_frac=0.0)
    block = compress(x, side, shared.k, shared, 1000)
    assert block.rank == 16
    assert np.abs(to_numpy(block.reconstruct()) - to_numpy(x)).max() < 5e-3


@SIDES
def test_affine_mlx_takes_only_what_mx_quantize_takes(side: str) -> None:
    shared = make_settings(base="affine_mlx", group_size=32)
    with pytest.raises(ValueError, match="group_size=32"):
        compress(mx.zeros((1, 1, 40, 40)), side, shared.k, shared, 2)
    for wrong in ({"bits": 7}, {"group_size": 16}, {"clip": True}, {"scale_bits": 8}):
        with pytest.raises(SettingError):
            resolve(GearConfig(base="affine_mlx", **wrong), 1)


@pytest.mark.fault
@SIDES
def test_shapes_that_are_no_block(side: str) -> None:
    shared = make_settings()
    for shape in ((8,), (8, 4), (2, 8, 4), (1, 1, 2, 8, 4)):
        with pytest.raises(ValueError, match=str(shape).replace("(", r"\(").replace(")", r"\)")):
            compress(mx.zeros(shape), side, shared.k, shared, 2)


@pytest.mark.fault
@pytest.mark.parametrize("tokens", [1, 5])
def test_few_tokens_stay_exact_in_the_buffer(tokens: int) -> None:
    """N=1 and N=5 with g=32: a block of them would cost more than fp16."""
    cache = GearCache(make_settings(group_size=32))
    x, y = mx.array(normal(1, 2, tokens, 32)), mx.array(normal(1, 2, tokens, 32, seed=1))
    cache.update_and_fetch(x, y)
    cache.flush()
    keys, values = cache.reconstruct()
    assert mx.array_equal(keys, x).item()
    assert mx.array_equal(values, y).item()
    assert cache.nbytes == x.nbytes + y.nbytes


@pytest.mark.fault
def test_no_tokens_are_an_empty_state() -> None:
    cache = GearCache(make_settings())
    assert cache.empty()
    assert (cache.offset, cache.size(), cache.nbytes) == (0, 0, 0)
    cache.update_and_fetch(mx.zeros((1, 2, 0, 32)), mx.zeros((1, 2, 0, 32)))
    cache.flush()
    assert (cache.offset, cache.nbytes) == (0, 0)


@SIDES
@pytest.mark.parametrize("base", ["grouped", "vector"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_far_from_zero(side: str, base: str, dtype: mx.Dtype) -> None:
    """Mean 1000, std 0.1 at 8 bits: half a step (of 255), not fp16's grid of 0.5."""
    x = mx.array(1000 + 0.1 * normal(1, 2, 64, 32)).astype(dtype)
    found = read_back(x, side, 0, base=base, bits=8, sparse_frac=0.0)
    exact = to_numpy(x)
    half_step = np.ptp(exact) / 255 / 2
    assert np.abs(found - exact).max() <= half_step * 1.01 + 1e-4
    with_terms = read_back(x, side, 2, base=base, bits=8, sparse_frac=0.02)
    assert np.abs(with_terms - exact).max() <= 2 * half_step + 1e-4


@pytest.mark.fault
@SIDES
@STAGES
@FORMS
def test_tiny_data_keeps_its_relative_error(side: str, stage: str, bits_of_terms: int) -> None:
    """Data of scale 1e-9: an absolute epsilon, or fp16's smallest numbers, would leave zeros."""
    x = normal(1, 2, 64, 32)
    values: dict[str, Any] = {
        "outlier_stage": stage, "sparse_frac": 0.05, "factor_bits": bits_of_terms,
        "outlier_bits": bits_of_terms, "scale_bits": bits_of_terms,
    }  # fmt: skip
    plain = np.linalg.norm(read_back(mx.array(x), side, 2, **values) - x) / np.linalg.norm(x)
    tiny = x * np.float32(1e-9)
    found = read_back(mx.array(tiny), side, 2, **values)
    assert np.linalg.norm(found - tiny) / np.linalg.norm(tiny) <= 1.02 * plain
