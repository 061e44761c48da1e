"""The shape of llama-3.2-1B with random weights, and caches of every kind filled with random K/V.

Peaks, bytes and speeds do not depend on what the weights say, and nothing has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

import gear
from benches.timing import device
from gear.generation import CacheMaker, fresh_caches
from gear.methods.fp16 import Fp16
from gear.methods.gear import Gear
from gear.methods.mlx_quant import MlxQuant

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
ON_A_CPU = {"num_hidden_layers": 2, "vocab_size": 1024}
"""What two cores can run: the bars name two layers of this shape."""

KINDS: dict[str, CacheMaker] = {
    "fp16": Fp16(),
    "mlx-lm quantized, 2 bits": MlxQuant(bits=2),
    "mlx-lm quantized, 4 bits": MlxQuant(bits=4),
    "mlx-lm quantized, 8 bits": MlxQuant(bits=8),
    "GEAR 2-bit": Gear(gear.GearConfig()),
}
"""What makes the caches: mlx-lm's `KVCache` and `QuantizedKVCache` (with their bytes reported)."""


def build(layers: int | None, dtype: mx.Dtype) -> Model:
    """Return the model of SHAPE, evaluated; a CPU gets ON_A_CPU of it."""
    sizes = {**SHAPE, **(ON_A_CPU if device() == "cpu" else {})}
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    mx.random.seed(0)
    model = Model(ModelArgs(**sizes))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    mx.clear_cache()
    return model


def kv_shape(model: Any) -> tuple[int, int]:
    """Return KV heads and head_dim of a llama of mlx-lm."""
    attention = model.layers[0].self_attn
    return attention.n_kv_heads, attention.head_dim


@contextmanager
def caches_of(kind: str, model: Any) -> Iterator[list[Any]]:
    """Give ``model`` empty caches of ``kind``; GEAR's attention is in place inside the block."""
    maker = KINDS[kind]
    if not isinstance(maker, Gear):
        yield fresh_caches(model, maker)
        return
    with gear.compressed(model, maker):
        yield make_prompt_cache(model)


def fill(
    caches: list[Any],
    shape: tuple[int, int],
    tokens: int,
    dtype: mx.Dtype,
    piece: int,
    *,
    flushed: bool = True,
) -> None:
    """Bring ``tokens`` random K and V [1, *shape] into every cache, ``piece`` tokens a call.

    ``flushed=False`` leaves the last call as it is right after a call, its tokens still exact.
    """
    heads, head_dim = shape
    for index, cache in enumerate(caches):
        for start in range(0, tokens, piece):
            size = (2, 1, heads, min(piece, tokens - start), head_dim)
            keys, values = mx.random.normal(size, dtype=dtype, key=mx.random.key(index))
            cache.update_and_fetch(keys, values)
            mx.eval(cache.state)
        if flushed:
            cache.flush()
            mx.eval(cache.state)
    mx.clear_cache()
