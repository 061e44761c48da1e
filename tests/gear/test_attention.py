"""Packed attention against reconstruct-then-SDPA: settings, shapes, masks, batches, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gear.attention import attend
from gear.bases import load_base
from gear.cache import GearCache
from gear.config import GearConfig, LayerSettings, resolve
from gear.grids import Grid
from gear.methods import METHODS, load_method
from gear.methods.family import GearFamily
from gear.port_cache import PortCache
from gear.port_config import KVCacheConfig
from gear.routing import Route

CONF = Path(__file__).parents[2] / "conf"
PRESETS = sorted(p.stem for p in (CONF / "gear").glob("*.yaml"))


def _base(target: str) -> str:
    """Return the base of K that a method sets, grouped where it sets none."""
    method: Any = load_method(target)
    switches = {**getattr(method, "switches", {}), **getattr(method, "switches_k", {})}
    return switches.get("base", "grouped")


FAMILY = sorted(
    n for n, t in METHODS.items()
    if issubclass(load_method(t), GearFamily) and not hasattr(load_base(_base(t)), "fit")
)  # fmt: skip
"""Methods of GEAR's family; what is fitted by calibration is in test_bases.py."""
TAKES_ALL = [n for n in FAMILY if isinstance(load_base(_base(METHODS[n])), Grid)]
"""Those that have every setting of the presets; the others are tried at the default one."""
CASES = [(p, n) for p in PRESETS for n in FAMILY if n in TAKES_ALL or p == "gear_2bit"]
TOLERANCE = {mx.float32: 1e-4, mx.float16: 2e-3}


def _preset(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / "gear" / f"{name}.yaml").read_text())


def _gear(name: str) -> GearConfig:
    values = {k: v for k, v in _preset(name).items() if k not in ("defaults", "k", "v")}
    return GearConfig(**values)


def _random(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _filled(
    layer: LayerSettings, calls: list[int], heads: int = 2, dims: tuple[int, int] = (64, 64),
    batch: int = 1, dtype: mx.Dtype = mx.float32,
) -> GearCache:  # fmt: skip
    """Return a cache after calls of so many tokens."""
    cache = GearCache(layer, 0)
    for i, n in enumerate(calls):
        k, v = (_random(2 * i + s, batch, heads, n, d, dtype=dtype) for s, d in enumerate(dims))
        cache.update_and_fetch(k, v)
    return cache


def _both(
    cache: GearCache, length: int, group: int = 2, mask: Any = "causal", sinks: Any = None,
    tile: int = 96,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return packed attention and reconstruct-then-SDPA of the newest ``length`` tokens."""
    keys, values = cache.reconstruct()
    batch, heads, _, head_dim = keys.shape
    queries = _random(99, batch, group * heads, length, head_dim, dtype=keys.dtype)
    mask = None if length == 1 and isinstance(mask, str) else mask
    scale = head_dim**-0.5
    expected = mx.fast.scaled_dot_product_attention(
        queries.astype(mx.float32), keys.astype(mx.float32), values.astype(mx.float32),
        scale=scale, mask=mask, sinks=sinks,
    )  # fmt: skip
    found = attend(queries, cache, scale, mask, sinks, tile)
    assert found.dtype == queries.dtype
    return np.array(found.astype(mx.float32)), np.array(expected)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("length", [1, 3, 70])
@pytest.mark.parametrize(("preset", "method"), CASES)
def test_every_preset_and_method(preset: str, method: str, length: int, dtype: mx.Dtype) -> None:
    made: Any = load_method(METHODS[method])(settings=_gear(preset))
    for index in (0, 1):  # gear_frontier's layers may differ
        cache = _filled(made.layers(2)[index], [150, 64, 64, 7, 1, length], dtype=dtype)
        assert cache.tokens_compressed > 0
        found, expected = _both(cache, length)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE[dtype])


SIDES = st.fixed_dictionaries({
    "bits": st.integers(1, 8), "group_size": st.sampled_from([8, 20, 32, 64, 128]),
    "base": st.sampled_from(["grouped", "vector"]), "rank": st.sampled_from([0, 1, 4, None]),
    "rank_decode": st.sampled_from([0, 2]), "sparse_frac": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    "factor_bits": st.sampled_from([16, 8, 4]), "outlier_bits": st.sampled_from([16, 8]),
    "scale_bits": st.sampled_from([16, 8]), "outlier_stage": st.sampled_from(
        ["pre_quant", "post_lowrank"]), "n_sink": st.sampled_from([0, 3]),
    "recent": st.sampled_from([0, 10]), "attend": st.sampled_from(["exact", "compressed"]),
})  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    side=SIDES,
    calls=st.lists(st.integers(1, 180), min_size=1, max_size=5),
    length=st.sampled_from([1, 2, 5, 90]),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dims=st.sampled_from([(64, 64), (80, 48), (32, 96)]),
    tile=st.sampled_from([1, 64, 100, 4096]),
)
def test_any_settings_shapes_and_fill(
    side: dict[str, Any], calls: list[int], length: int, heads: int, group: int,
    dims: tuple[int, int], tile: int,
) -> None:  # fmt: skip
    n_b = None if side["base"] == "vector" else 2 * max(side["group_size"], 20)
    config = GearConfig(**side, n_b=n_b, allow_larger_than_fp16=True)
    cache = _filled(resolve(config, 1)[0], [*calls, length], heads, dims)
    found, expected = _both(cache, length, group, tile=tile)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["bool", "additive", "per head", "-inf", "two axes", "one row"])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_masks(kind: str, length: int) -> None:
    cache = _filled(resolve(GearConfig(), 1)[0], [200, 64, length])
    tokens = cache.offset
    hidden = (mx.arange(tokens) % 3 == 1)[None] & (mx.arange(length) >= 0)[:, None]
    mask = {
        "bool": ~hidden[None, None],
        "additive": mx.where(hidden, -2.0, 0.5)[None, None],
        "per head": _random(5, 1, 4, length, tokens) > 0,
        "-inf": mx.where(hidden, -float("inf"), 0.0)[None, None],
        "two axes": ~hidden,
        "one row": ~hidden[None, None, :1],
    }[kind]
    found, expected = _both(cache, length, mask=mask)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("length", [1, 33])
def test_attention_sinks_take_weight_alone(length: int) -> None:
    cache = _filled(resolve(GearConfig(), 1)[0], [200, 64, length])
    found, expected = _both(cache, length, sinks=mx.array([3.0, -1.0, 0.0, 9.0]))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    without, _ = _both(cache, length)
    assert np.abs(without - expected).max() > 0.01


@pytest.mark.parametrize("trimmed", [1, 5, 64, 100, 210])
@pytest.mark.parametrize("length", [1, 50])
def test_after_a_trim(trimmed: int, length: int) -> None:
    cache = _filled(resolve(GearConfig(), 1)[0], [200, 64, 64, 9])
    cache.trim(trimmed)
    cache.update_and_fetch(*(_random(s, 1, 2, length, 64) for s in (7, 8)))
    found, expected = _both(cache, length)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("exact_values", [True, False])
@pytest.mark.parametrize("length", [1, 50])
def test_the_ports_cache(exact_values: bool, length: int) -> None:
    config = KVCacheConfig(head_dim=64, gear_quantize_values=not exact_values)
    cache: Any = config.make_cache(0, 1)
    assert type(cache) is PortCache
    for n in (200, 40, length):
        cache.update_and_fetch(*(_random(n + s, 1, 2, n, 64) for s in (0, 1)))
    found, expected = _both(cache, length)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_rows_of_a_batch_are_apart() -> None:
    cache = _filled(resolve(GearConfig(), 1)[0], [150, 64, 5], batch=3)
    found, expected = _both(cache, 5)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_layers_that_share_anothers_k_and_v_get_what_it_got() -> None:
    cache = _filled(resolve(GearConfig(), 1)[0], [150, 64, 5], dims=(64, 96))
    dense = cache.keys_and_values()
    assert [a.shape for a in dense] == [(1, 2, 219, 64), (1, 2, 219, 96)]
    cache.route = Route(frozenset([0]), tile=64)
    handles = cache.keys_and_values()
    assert [h.shape for h in handles] == [a.shape for a in dense]
    assert {h.dtype for h in handles} == {mx.float32}
    queries = _random(3, 1, 4, 5, 64)
    expected = mx.fast.scaled_dot_product_attention(queries, *dense, scale=0.1, mask="causal")
    found = handles[0].astype(mx.float16).attend(queries, 0.1, "causal", None)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-4)


# -- memory ----------------------------------------------------------------------------------

TOKENS, HEADS, DIM = 8192, 4, 64
FP16_BYTES = 2 * TOKENS * HEADS * DIM  # of K or V of the layer


def _peak(length: int, *, dense: bool) -> float:
    """Return the peak of one attention over what the cache holds, in fp16 sizes of its K."""
    cache = _filled(resolve(GearConfig(), 1)[0], [TOKENS, 64, 64, length], heads=HEADS)
    queries = _random(3, 1, 2 * HEADS, length, DIM)
    mx.eval(queries, cache.state[2:])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    if dense:
        out = mx.fast.scaled_dot_product_attention(
            queries, *cache.reconstruct(), scale=0.1, mask="causal" if length > 1 else None
        )
    else:
        out = attend(queries, cache, 0.1, "causal" if length > 1 else None, tile=512)
    mx.eval(out)
    return (mx.get_peak_memory() - before) / FP16_BYTES


@pytest.mark.parametrize(("length", "bound"), [(1, 0.9), (64, 2.0)])
def test_no_dense_k_or_v_is_made(length: int, bound: float) -> None:
    """fp32 K and V of the past alone are 4 such sizes; 64 queries' scores would be 4 more."""
    assert _peak(length, dense=False) < bound
    assert _peak(length, dense=True) > 4
