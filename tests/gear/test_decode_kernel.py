"""The fused decode kernel: its text run on the host, what it takes, and when it gives up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gear import decode_kernel
from gear.block import Block
from gear.codec import compress_pair
from gear.config import GearConfig, LayerConfig, SideConfig, resolve
from gear.decode_kernel_source import INPUTS, SIZES, sources
from gear.decode_kernel_variant import Variant
from gear.placement import on_cpu
from tests.gear import decode_host

needs_compiler = pytest.mark.skipif(not decode_host.COMPILER, reason="no C++ compiler")


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the kernel's CUDA text run on the host."""
    folder = tmp_path_factory.getbasetemp()  # programs of one session are compiled once
    monkeypatch.setattr(decode_kernel, "backend", lambda: "cuda")
    monkeypatch.setattr(
        decode_kernel,
        "_build",
        lambda name, _kind, *constants: decode_host.kernel(folder, name, constants),
    )


def _pair(
    settings: dict[str, Any], shape: tuple[int, ...], count: int = 1, prefill: bool = True
) -> tuple[Block, Block]:
    """Compress ``count`` random blocks of [batch, kv_heads, tokens, head_dim]."""
    sides = {side: SideConfig(**settings.pop(side, {})) for side in "kv"}
    layer = resolve(GearConfig(**settings, **sides, by_layer={0: LayerConfig()}), 1)[0]
    draw = np.random.default_rng(0)
    pairs = []
    for _ in range(count):
        keys, values = (mx.array(draw.standard_normal(shape), mx.float32) for _ in "kv")
        pairs.append(compress_pair(keys, values, layer, prefill))
    k, v = pairs[0]
    for more in pairs[1:]:
        k, v = k.joined(more[0]), v.joined(more[1])
    return k, v


def _expected(queries: mx.array, k: Block, v: Block, valid: int) -> tuple[np.ndarray, np.ndarray]:
    """Reconstruct, then softmax in fp64: the output and the log of the weights' sum."""
    q = np.array(queries.astype(mx.float32), np.float64)
    group = q.shape[1] // k.arrays["codes"].shape[1]
    keys, values = (
        np.repeat(np.array(b.reconstruct(), np.float64)[:, :, :valid], group, axis=1)
        for b in (k, v)
    )
    scores = q @ keys.swapaxes(-1, -2)
    peak = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - peak)
    total = p.sum(axis=-1, keepdims=True)
    return p @ values / total, peak + np.log(total)


CASES = {
    # settings, [batch, kv_heads, tokens, head_dim], blocks, query heads, valid, form
    "default": ({}, (1, 2, 640, 64), 1, 8, 640, "matrix"),
    "decode blocks": ({}, (2, 1, 64, 128), 11, 3, 690, "matrix"),
    "sides differ": (
        {"k": {"bits": 4, "rank": 0}, "v": {"bits": 8, "sparse_frac": 0.0, "group_size": 32}},
        (1, 2, 576, 64), 1, 2, 555, "matrix",
    ),
    "8 and 2 bits, many outliers": (
        {"k": {"bits": 8}, "sparse_frac": 0.2, "group_size": 32}, (1, 1, 96, 96), 7, 8, 600,
        "matrix",
    ),
    "one key of many": ({"rank": 0, "sparse_frac": 0.0}, (1, 2, 128, 64), 1, 2, 1, "matrix"),
    "one group a vector": (
        {"base": "vector", "n_b": 32, "bits": 4}, (1, 2, 32, 64), 20, 4, 601, "words",
    ),
    "head_dim 80": ({"bits": 4}, (1, 2, 128, 80), 5, 10, 600, "words"),
    "seven heads": ({"k": {"bits": 8}}, (1, 1, 1088, 64), 1, 7, 1030, "words"),
    "blocks across tiles": ({"group_size": 32, "n_b": 96}, (1, 1, 96, 64), 12, 5, 1100, "words"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_reconstruct_then_softmax(name: str, on_host: None) -> None:
    settings, shape, count, heads, valid, form = CASES[name]
    k, v = _pair(dict(settings), shape, count, prefill=count == 1)
    draw = np.random.default_rng(1).standard_normal((shape[0], heads, 1, shape[3]))
    queries = mx.array(draw * 0.3, mx.float32)
    assert decode_kernel._fits(queries, k, v)
    assert decode_kernel._needed(queries, k, v, "cuda").form == form
    out, peak, weight = decode_kernel.partial(queries, k, v, valid)
    expected, logsum = _expected(queries, k, v, valid)
    assert out.shape == (shape[0], heads, 1, shape[3])
    assert peak.shape == weight.shape == (shape[0], heads, 1, 1)
    np.testing.assert_allclose(np.array(out / weight), expected, atol=5e-5)
    np.testing.assert_allclose(np.array(peak + mx.log(weight)), logsum, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize(
    ("n_b", "tokens", "count", "sparse_frac"),
    [(64, 1600, 1, 0.1), (160, 160, 10, 0.02), (64, 64, 25, 0.1)],
)
def test_a_thread_group_goes_on_from_tile_to_tile(
    n_b: int, tokens: int, count: int, sparse_frac: float, on_host: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(decode_kernel._THREAD_GROUPS, "cuda", 1)
    settings = {"group_size": 32, "n_b": n_b, "sparse_frac": sparse_frac}
    k, v = _pair(settings, (1, 1, tokens, 64), count, prefill=count == 1)
    queries = mx.array(np.random.default_rng(1).standard_normal((1, 2, 1, 64)) * 0.3, mx.float32)
    out, peak, weight = decode_kernel.partial(queries, k, v, 1590)
    expected, logsum = _expected(queries, k, v, 1590)
    np.testing.assert_allclose(np.array(out / weight), expected, atol=5e-5)
    np.testing.assert_allclose(np.array(peak + mx.log(weight)), logsum, atol=1e-4)


@needs_compiler
def test_large_queries_and_half_precision(on_host: None) -> None:
    k, v = _pair({}, (1, 1, 128, 64))
    queries = mx.array(np.random.default_rng(1).standard_normal((1, 4, 1, 64)) * 900, mx.float16)
    out, _, weight = decode_kernel.partial(queries, k, v, 128)
    expected, _ = _expected(queries, k, v, 128)
    np.testing.assert_allclose(np.array(out / weight), expected, atol=2e-2)


@needs_compiler
def test_scales_in_fp32_are_read_by_the_words_form(on_host: None) -> None:
    k, v = _pair({}, (1, 1, 128, 64))
    wide = {n: a.astype(mx.float32) for n, a in k.arrays.items() if a.dtype == mx.float16}
    k = replace(k, arrays=k.arrays | wide)
    queries = mx.array(np.random.default_rng(1).standard_normal((1, 4, 1, 64)), mx.float32)
    assert decode_kernel._needed(queries, k, v, "cuda").form == "words"
    out, _, weight = decode_kernel.partial(queries, k, v, 100)
    np.testing.assert_allclose(np.array(out / weight), _expected(queries, k, v, 100)[0], atol=5e-5)


REFUSED = {
    "3 bits": {"bits": 3},
    "8-bit scales": {"scale_bits": 8},
    "8-bit factors": {"factor_bits": 8},
    "8-bit outliers": {"outlier_bits": 8, "sparse_frac": 0.1},
    "port order": {"outlier_stage": "post_lowrank"},
    "a short last group": {"group_size": 48, "n_b": 48},
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_it_is_not_written_for_are_refused(name: str) -> None:
    k, v = _pair(dict(REFUSED[name]), (1, 2, 64, 64))
    assert not decode_kernel._fits(mx.zeros((1, 4, 1, 64)), k, v)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 4, 2, 64), mx.float32), ((1, 18, 1, 64), mx.float32), ((1, 3, 1, 64), mx.float32),
     ((1, 4, 1, 64), mx.int32)],
)  # fmt: skip
def test_queries_it_is_not_written_for_are_refused(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    k, v = _pair({}, (1, 2, 64, 64))
    assert decode_kernel._fits(mx.zeros((1, 4, 1, 64)), k, v)
    assert not decode_kernel._fits(mx.zeros(shape, dtype), k, v)


def test_ragged_words_and_many_low_rank_rows_are_refused() -> None:
    queries = mx.zeros((1, 4, 1, 64))
    assert not decode_kernel._fits(queries, *_pair({"group_size": 4, "n_b": 20}, (1, 2, 20, 64)))
    many = _pair({"rank_decode": 8, "group_size": 16, "n_b": 16}, (1, 2, 16, 64), prefill=False)
    assert not decode_kernel._fits(queries, *many)


@pytest.mark.skipif(not on_cpu(), reason="an accelerator has one")
def test_the_cpu_has_no_kernel() -> None:
    assert not decode_kernel.usable(mx.zeros((1, 4, 1, 64)), *_pair({}, (1, 2, 64, 64)))


@pytest.mark.parametrize(
    ("tokens", "rows", "expected"),
    [
        (1, 8, (1, 1)),
        (512, 8, (1, 1)),
        (513, 8, (2, 1)),
        (65536, 8, (64, 2)),
        (65536, 999, (1, 128)),
    ],
)
def test_splits_cover_all_tokens(tokens: int, rows: int, expected: tuple[int, int]) -> None:
    assert decode_kernel.splits(tokens, rows, "cuda") == expected
    assert expected[0] * expected[1] * decode_kernel.TILE >= tokens


def _variant(kind: str, group: int, head_dim: int, bits: int) -> Variant:
    half, code = mx.float16, mx.uint32
    side = (code, half, half, half, half, mx.uint8, half)
    return Variant(kind, group, head_dim, bits, bits, 64, 64, (half, *side, *side))


@pytest.mark.parametrize("kind", ["metal", "cuda"])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_what_a_variant_needs_fits_the_device(kind: str, group: int, head_dim: int) -> None:
    for bits in (2, 4, 8):
        variant = _variant(kind, group, head_dim, bits)
        found = variant.constants
        if found is None:
            assert group in (5, 7) or head_dim == 256  # the rest is promised
            continue
        held = 4 * head_dim + 4 * found["G"] * (
            2 * head_dim + found["ROWS"] + found["SIMDS"] + found["SCRATCH"]
        )
        assert held <= (32 if kind == "metal" else 48) * 1024
        assert found["G"] * variant.parts == group
        assert found["SCRATCH"] >= max(found["SIMDS"] * 512, 512 + found["SLOTS"] * head_dim)
        assert 32 * found["SIMDS"] // found["SLOTS"] <= 32
        if variant.form == "matrix":
            assert kind == "cuda"
            assert found["SIMDS"] * found["K_UNITS"] * found["K_UNIT"] == 512
            assert min(found["K_ROWS"], found["V_ROWS"]) >= 16


def test_metal_gets_the_tested_text_and_no_word_of_cuda() -> None:
    constants = tuple((_variant("metal", 4, 128, 2).constants or {}).items())
    (metal_head, metal), (cuda_head, cuda) = (
        sources("words", kind, constants) for kind in ("metal", "cuda")
    )
    macros = metal_head.count("#define") - metal_head.count("#define EACH_HEAD")
    assert metal_head.splitlines()[macros:] == cuda_head.splitlines()[macros:]
    places = [t.split("const unsigned valid", 1) for t in (metal, cuda)]
    assert places[0][1] == places[1][1]
    for word in ("__", "threadIdx", "blockIdx", "asm", "float4", "cuda"):
        assert word not in metal_head + metal
    assert "thread_position_in_threadgroup" in metal
    assert "threadgroup_barrier" in metal_head
    assert all(f"{name} = sizes[{i}];" in metal for i, name in enumerate(SIZES))
    assert len(INPUTS) == 16


@needs_compiler
def test_it_is_held_against_plain_operations_when_first_wanted(on_host: None) -> None:
    queries = mx.zeros((1, 4, 1, 64), mx.float16)
    assert decode_kernel.usable(queries, *_pair({}, (1, 2, 64, 64)))


@pytest.mark.parametrize("fails", ["disagrees", "does not compile"])
def test_a_kernel_that_is_wrong_is_switched_off_with_a_warning(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> Any:
        def run(**call: Any) -> list[mx.array]:
            if fails != "disagrees":
                raise RuntimeError("no such instruction\nline 2")
            return [mx.ones(shape) for shape in call["output_shapes"]]

        return run

    monkeypatch.setattr(decode_kernel, "_build", build)
    problem = "off by" if fails == "disagrees" else "no such instruction"
    with pytest.warns(RuntimeWarning, match=f"switched off for 2-bit K and 2-bit V.*{problem}"):
        assert not decode_kernel._trusted.__wrapped__(_variant("metal", 2, 64, 2))
