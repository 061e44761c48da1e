"""What the port's functions do with awkward input: kept, or an error that names it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gear import NonFiniteError, port

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
AXES = ["channel", "token"]


def _x(tokens: int, head_dim: int = 48) -> mx.array:
    return mx.random.normal((tokens, head_dim), key=mx.random.key(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 33])
def test_every_length_works_in_the_callers_dtype(tokens: int, axis: str, dtype: mx.Dtype) -> None:
    x = _x(tokens).astype(dtype)
    state = port.gear_compress(x, rank=2, base_axis=axis)
    back = port.gear_reconstruct(state)
    assert (back.dtype, back.shape) == (dtype, x.shape)
    assert port.quantize_base(x, 2, axis=axis)[1].dtype == dtype
    assert state.rank == min(2, tokens)
    if tokens:
        assert np.abs(np.array((back - x).astype(mx.float32))).max() < 1.5
    else:
        assert port.gear_bytes(state) == 0


@pytest.mark.parametrize("axis", AXES)
def test_one_huge_entry_is_kept_and_nothing_is_inf(axis: str) -> None:
    x = _x(64, 64)
    x[3, 5] = 1e5
    back = port.gear_quant_dequant(x, rank=2, base_axis=axis)
    assert mx.isfinite(back).all().item()
    assert back[3, 5].item() == pytest.approx(1e5, rel=1e-3)


def test_a_value_beyond_fp16_in_bf16_is_kept() -> None:
    x = _x(64, 64).astype(mx.bfloat16)
    x[3, 5] = 7e4
    back = port.gear_quant_dequant(x, rank=2, base_axis="channel")
    assert mx.isfinite(back).all().item()
    assert back[3, 5].item() == pytest.approx(7e4, rel=1e-2)


def test_the_largest_fp16_value_does_not_round_to_inf() -> None:
    x = mx.full((64, 64), 65504.0)
    x[0] = -37 * mx.arange(64)  # as many scales, some of which fp16 rounds up
    x = x.astype(mx.float16)
    base = port.quantize_base(x, 2, axis="channel")[1]
    back = port.gear_quant_dequant(x, 2, rank=0, sparse_frac=0, base_axis="channel")
    assert mx.allclose(back, x, rtol=2**-9, atol=2)
    assert mx.array_equal(back, base)


def test_a_constant_head_is_exact() -> None:
    x = mx.full((40, 40), 0.1)
    assert mx.array_equal(port.gear_quant_dequant(x), x)


def test_the_relative_error_does_not_depend_on_the_scale() -> None:
    errors = []
    for scale in (1.0, 1e-9):
        x = _x(64) * scale
        miss = port.gear_quant_dequant(x, rank=2) - x
        errors.append((mx.linalg.norm(miss) / mx.linalg.norm(x)).item())
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)


def test_a_far_mean_keeps_its_precision() -> None:
    x = _x(64) * 0.1 + 1000
    miss = port.gear_quant_dequant(x, 8, rank=0, sparse_frac=0) - x
    assert np.abs(np.array(miss)).max() < 2e-3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bits", 0), ("bits", 9), ("bits", 2.5), ("bits", "4"), ("bits", True),
        ("rank", -3), ("rank", 1.0), ("rank", "4"), ("group_size", 0), ("group_size", "32"),
        ("sparse_frac", 1.5), ("sparse_frac", -1), ("sparse_frac", float("nan")),
        ("sparse_frac", 2), ("sparse_frac", "0.1"), ("energy_threshold", 1.1),
        ("base_axis", "tokens"),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_an_error_that_names_it(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name}={value!r}: must be"):
        port.gear_compress(_x(16), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: port.quantize_base(_x(8), 2, axis="rows"), "axis"),
        (lambda: port.quantize_base(_x(8), 2, 0), "group_size"),
        (lambda: port.quantize_base(_x(8), 0), "bits"),
        (lambda: port.lowrank_error(_x(8), -1), "rank"),
        (lambda: port.lowrank_error(_x(8), None, float("nan")), "energy_threshold"),
        (lambda: port.sparse_outliers(_x(8), 2), "frac"),
        (lambda: port.sparse_outliers_batched(_x(8)[None], float("inf")), "frac"),
    ],
)
def test_each_function_checks_its_own_settings(call: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}="):
        call()


@pytest.mark.parametrize("x", [mx.zeros(3), mx.zeros((2, 3, 4)), mx.zeros((2, 3), mx.int32), [1]])
def test_a_shape_that_is_no_head_is_an_error(x: Any) -> None:
    for call in (port.gear_compress, lambda x: port.quantize_base(x, 2)):
        with pytest.raises(ValueError, match=r"x: must be a floating-point .* head \[N, D\]; got"):
            call(x)
    with pytest.raises(ValueError, match=r"must have the shape of x, \(8, 48\)"):
        port.residual(_x(8), _x(7))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_never_reach_a_factorisation(value: float) -> None:
    x = _x(20)
    x[3, 4] = value
    calls = {
        0: [
            lambda: port.gear_compress(x), lambda: port.quantize_base(x, 2),
            lambda: port.lowrank_error(x, 2), lambda: port.sparse_outliers(x, 0.1),
        ],
        1: [lambda: port.sparse_outliers_batched(mx.stack([_x(20), x]), 0.1)],
    }  # fmt: skip
    for head, functions in calls.items():
        for call in functions:
            with pytest.raises(NonFiniteError) as caught:
                call()
            assert (caught.value.head, caught.value.count) == (head, 1)


def test_a_range_beyond_fp32_is_kept_or_an_error_and_never_an_exit() -> None:
    x = mx.array([[3e38, -3e38] * 8] * 8)
    assert mx.allclose(port.gear_quant_dequant(x, rank=2), x, rtol=1e-3)
    with pytest.raises(NonFiniteError):  # U·s itself is beyond fp32
        port.gear_compress(mx.array([[3e38, -3e38] * 32] * 64), rank=2)
