"""gear.compressed: fresh caches for every generation, and the model as it was afterwards."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

import gear
from gear import GearConfig, KVCacheConfig, PortCache, SettingError
from gear.cache import GearCache
from gear.generation import fresh_caches
from gear.methods.gear import Gear
from gear.methods.kivi import Kivi
from gear.methods.mlx_quant import MlxQuant
from gear.mlx_quantized import MlxQuantizedCache
from tests.gear.letters import generate, make_model

CONFIGS = {
    "port": (KVCacheConfig(head_dim=64), PortCache),
    "gear": (GearConfig(), GearCache),
    "method": (Kivi(GearConfig(bits=4)), GearCache),
    "mlx_quant": (MlxQuant(), MlxQuantizedCache),
}


class Plain(nn.Module):
    """A model without make_cache, and without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [0, 1, 2]


class Native(Plain):
    """A model that makes its own caches."""

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in self.layers]


class Sliding(Plain):
    """A model with one full-attention layer among sliding ones."""

    def make_cache(self) -> list[Any]:
        return [RotatingKVCache(max_size=8), KVCache(), RotatingKVCache(max_size=8)]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_generation_gets_fresh_caches(name: str) -> None:
    config, kind = CONFIGS[name]
    model = make_model()
    with gear.compressed(model, config):
        one, two = make_prompt_cache(model), make_prompt_cache(model, max_kv_size=100)
        assert all(type(c) is kind for c in one)
        assert not {id(c) for c in one} & {id(c) for c in two}
        texts = [generate(model) for _ in range(2)]
    assert len(texts[0]) == 20
    assert texts[0] == texts[1]
    assert all(type(c) is KVCache for c in make_prompt_cache(model))


def test_the_cache_is_in_use_inside_and_gone_outside() -> None:
    model = make_model()
    exact = generate(model)
    with gear.compressed(model, GearConfig(rank=0, rank_decode=0, sparse_frac=0.0)):
        coarse = generate(model)
    assert coarse != exact
    assert generate(model) == exact


no_attention = pytest.mark.filterwarnings("ignore:.*3 of 3 layers do not pass K and V")


@no_attention
@pytest.mark.parametrize("model", [Plain(), Native(), make_model()])
def test_a_model_is_left_as_it_was(model: Any) -> None:
    had, before = hasattr(model, "make_cache"), dict(vars(model))
    kinds = []

    def fail() -> None:
        with gear.compressed(model, GearConfig()):
            kinds.append(type(model.make_cache()[0]))
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert kinds == [GearCache]
    assert hasattr(model, "make_cache") == had
    assert dict(vars(model)) == before


@no_attention
def test_what_stood_on_the_instance_comes_back() -> None:
    model = Native()
    mine = model.make_cache = lambda: ["mine"]  # type: ignore[method-assign,assignment]
    with gear.compressed(model, GearConfig()):
        assert all(type(c) is GearCache for c in model.make_cache())
        with gear.compressed(model, KVCacheConfig()):
            assert all(type(c) is PortCache for c in model.make_cache())
        assert all(type(c) is GearCache for c in model.make_cache())
    assert model.make_cache is mine


def test_other_layers_keep_their_own_cache() -> None:
    caches = fresh_caches(Sliding(), Gear())
    assert [type(c) for c in caches] == [RotatingKVCache, GearCache, RotatingKVCache]
    assert caches[1].layer == 1


def test_layers_take_their_own_settings() -> None:
    by_layer = {1: gear.config.LayerConfig(k=gear.config.SideConfig(bits=4))}
    with gear.compressed(model := make_model(), GearConfig(by_layer=by_layer)):
        assert [c.settings.k.bits for c in make_prompt_cache(model)] == [2, 4]


def test_a_model_without_a_plain_cache_is_refused() -> None:
    class Rotating(Plain):
        def make_cache(self) -> list[Any]:
            return [RotatingKVCache(max_size=8) for _ in self.layers]

    with (
        pytest.raises(ValueError, match=r"Rotating: no layer .*\(it has RotatingKVCache\)"),
        gear.compressed(Rotating(), GearConfig()),
    ):
        pass


@pytest.mark.parametrize("config", [None, "gear", Gear, {"bits": 2}, GearCache])
def test_what_is_no_config_is_refused(config: Any) -> None:
    with pytest.raises(ValueError, match="must be a GearConfig"), gear.compressed(Plain(), config):
        pass


def test_a_wrong_setting_is_told_on_entry() -> None:
    model = Plain()
    with (
        pytest.raises(SettingError, match=r"gear\.bits=9"),
        gear.compressed(model, GearConfig(bits=9)),
    ):
        pass
    assert not hasattr(model, "make_cache")


def test_a_sliding_llama_generates() -> None:
    arguments = llama.ModelArgs(
        model_type="llama", hidden_size=128, num_hidden_layers=2, intermediate_size=64,
        num_attention_heads=2, rms_norm_eps=1e-5, vocab_size=256, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = llama.Model(arguments)
    mx.eval(model.parameters())
    with gear.compressed(model, GearConfig()):
        kinds = [type(c) for c in make_prompt_cache(model)]
        text = generate(model, 5)
    assert kinds == [RotatingKVCache, GearCache]
    assert len(text) == 5
