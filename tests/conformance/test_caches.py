"""What every conf/cache/*.yaml must do, found by itself: the same contract for every method."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import save_prompt_cache
from omegaconf import OmegaConf

from evals.caches import Caches, make_caches
from gear import GearConfig, load_prompt_cache
from gear.bases import BASES
from gear.methods import METHODS, load_method
from tests.gear.calibrated import calibration_file, needs_file

ROOT = Path(__file__).parents[2]
OPTIONS = sorted(path.stem for path in (ROOT / "conf/cache").glob("*.yaml"))
LENGTHS = [1, 5, 33, 300]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
ERROR = {"rabitq": 0.8, "turboquant_prod_2bit": 0.8, "commvq_1bit": 0.65}
"""Bounds of methods whose unbiased scores cost error, √(π/2 - 1) and √(0.36 · π/2) on keys, and of
one bit an element, by which a normal variable is at best √(1/4) off."""


def method_of(option: str) -> Any:
    """Build the method of an option as its YAML says, GEAR's numbers at their defaults."""
    node = _node(option)
    fields = {k: v for k, v in node.items() if k not in ("name", "_target_", "settings")}
    cls = load_method(node["_target_"])
    if cls.name in BASES and needs_file(cls.name):
        fields["calibration"] = calibration_file(cls.name)
    return cls(**fields, **({"settings": GearConfig()} if cls.uses_gear else {}))


def _node(option: str) -> dict[str, Any]:
    node = OmegaConf.load(ROOT / f"conf/cache/{option}.yaml")
    return OmegaConf.to_container(node, resolve=False)  # type: ignore[return-value]


def caches_of(option: str) -> Caches:
    return make_caches(SimpleNamespace(layers=[None, None]), method_of(option))


def kv(tokens: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    k, v = (mx.random.normal((1, 2, tokens, 64), key=mx.random.key(s)) for s in (1, 2))
    return k.astype(dtype), v.astype(dtype)


def fill(caches: Caches, tokens: int, dtype: mx.Dtype = mx.float32) -> Caches:
    for layer in caches.layers:
        if getattr(layer, "query_window", 0):  # as the harness hands over an exact prefill
            layer.observe(mx.random.normal((1, 4, tokens, 64), key=mx.random.key(3)))
        layer.update_and_fetch(*kv(tokens, dtype))
    caches.flush()
    return caches


def test_every_option_names_its_method_and_every_method_has_an_option() -> None:
    by_target = {target: name for name, target in METHODS.items()}
    found = set()
    for option in OPTIONS:
        node = _node(option)
        assert node["name"] == option
        assert load_method(node["_target_"]).name == by_target[node["_target_"]]
        found.add(by_target[node["_target_"]])
    assert found == set(METHODS)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_empty_cache_is_empty(option: str) -> None:
    caches = caches_of(option)
    caches.flush()
    size = caches.bytes()
    assert all(layer.empty() and layer.offset == 0 for layer in caches.layers)
    assert size["stored_bytes"] == size["held_bytes"] == size["fp16_bytes"] == 0


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_bytes_add_up_and_are_those_of_the_arrays(option: str, tokens: int) -> None:
    size = fill(caches_of(option), tokens).bytes()
    assert size["stored_bytes"] == size["accounted_bytes"] + size["buffer_bytes"]
    assert sum(size["terms"].values()) == size["stored_bytes"]
    assert size["fp16_bytes"] == 2 * 2 * 2 * 2 * tokens * 64
    # K and V are fp32 here: exact tokens are held at twice what they count, no term at less
    assert size["held_bytes"] >= size["stored_bytes"]
    if tokens == 300:
        compresses = method_of(option).compresses
        assert (size["tokens_compressed_min"] > 0) == compresses
        budget = getattr(method_of(option), "budget", 0)  # what an eviction is to keep
        most = max(0.7, (budget + 3) / tokens)
        assert (size["stored_bytes"] < most * size["fp16_bytes"]) == compresses


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_bounded_and_the_dtype_kept(option: str, dtype: mx.Dtype) -> None:
    caches = fill(caches_of(option), 300, dtype)
    for x, seen in zip(kv(300, dtype), caches.layers[0].reconstruct(), strict=True):
        assert seen.dtype == dtype
        error = mx.linalg.norm((seen - x).astype(mx.float32)) / mx.linalg.norm(x.astype(mx.float32))
        assert error.item() < (ERROR.get(option, 0.6) if method_of(option).compresses else 1e-6)


@pytest.mark.parametrize("option", OPTIONS)
def test_two_fillings_are_bit_identical(option: str) -> None:
    one, other = fill(caches_of(option), 200), fill(caches_of(option), 200)
    for a, b in zip(one.layers[1].reconstruct(), other.layers[1].reconstruct(), strict=True):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("option", OPTIONS)
def test_trim_deepcopy_save_and_load(option: str, tmp_path: Path) -> None:
    caches = fill(caches_of(option), 200)
    layer = caches.layers[0]
    other = copy.deepcopy(layer)
    assert layer.trim(50) == 50
    assert (layer.offset, other.offset) == (150, 200)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, [layer])
    (loaded,) = load_prompt_cache(file)
    assert type(loaded) is type(layer)
    for a, b in zip(loaded.reconstruct(), layer.reconstruct(), strict=True):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_mask_spans_past_and_new_tokens(option: str) -> None:
    layer = fill(caches_of(option), 70).layers[0]
    assert layer.make_mask(1, return_array=False, window_size=None) is None
    assert layer.make_mask(3, return_array=True, window_size=None).shape == (3, 73)
