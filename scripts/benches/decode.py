"""Decoding end to end: tokens/s and stored bytes of every cache; and against veloxquant-mlx's gear.

On a CPU the bundled model in fp32 (where it was fetched), on a GPU the shape of llama-3.2-1B with
random weights in fp16, behind ``--context`` tokens of random K and V. A timing is n_b = 64 steps,
so that the block that GEAR forms is in it, divided by 64. On a CPU, where the package
veloxquant-mlx is installed, its gear takes its turns too: in whole steps; and in one layer of 32
query and 8 KV heads with D = 128, in updates (append, and compression amortised over a block) and
in update and attention.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from benches.llama import KINDS, build, caches_of, fill, kv_shape
from benches.memory import decode
from benches.timing import MIB, Options, Row, at_least, device, in_turns
from gear.cache import GearCache

CONTEXT = 8192
STEPS = 64
REPEATS = 3
QUERY_HEADS, LAYER_SHAPE = 32, (8, 128)
STEP_FASTER, UPDATE_FASTER = 2.5, 10
OURS, PEER = "GEAR 2-bit", "veloxquant-mlx gear"
PEER_MODULE = "veloxquant_mlx"
PEER_SETTINGS = {
    "method": "gear", "gear_bits": 2, "gear_rank": 4, "gear_sparse_fraction": 0.02,
    "gear_group_size": 64,
}  # fmt: skip


def run(options: Options) -> list[Row]:
    """Measure whole steps and stored bytes, and on a CPU updates against the peer's."""
    where = device()
    dtype = getattr(mx, options.dtype or ("float32" if where == "cpu" else "float16"))
    name, model = _model(where, options, dtype)
    rows = _whole_steps(name, model, options, dtype)
    return rows + _one_layer(model, options, dtype) if where == "cpu" else rows


def _model(where: str, options: Options, dtype: mx.Dtype) -> tuple[str, Any]:
    """Return name and model: the bundled one on a CPU that has it, else random weights."""
    if where == "cpu" and options.layers is None:
        from mlx_lm.utils import load_model

        from evals.assets import smollm2_dir

        if smollm2_dir().is_dir():
            model: Any = load_model(smollm2_dir())[0]
            model.set_dtype(dtype)
            mx.eval(model.parameters())
            return "SmolLM2-135M", model
    model = build(options.layers, dtype)
    return f"llama-3.2-1B shape, {len(model.layers)} layers", model


def _whole_steps(name: str, model: Any, options: Options, dtype: mx.Dtype) -> list[Row]:
    """Return time a step, tokens/s and stored bytes of every kind of cache, taken in turns."""
    context = options.context or CONTEXT
    with ExitStack() as stack:
        caches, stored = {}, {}
        for kind in KINDS:
            caches[kind] = stack.enter_context(caches_of(kind, model))
            fill(caches[kind], kv_shape(model), context, dtype, options.fill)
            stored[kind] = sum(cache.cache_bytes().stored for cache in caches[kind]) / MIB
        if device() == "cpu" and find_spec(PEER_MODULE):
            caches[PEER] = _peer_caches(model, kv_shape(model), context)
        runs = {kind: partial(decode, model, own, STEPS) for kind, own in caches.items()}
        timed = in_turns(runs, options.repeats or REPEATS, STEPS)
    times = {kind: row["median_ms"] for kind, row in timed.items()}
    for kind, row in timed.items():
        row |= {
            "name": f"{kind}: a step of {name} at {context} tokens",
            "tok_per_s": 1000 / times[kind],
            "ratio": times[kind] / times["fp16"],
        }
        if kind in stored:
            row["mib"] = stored[kind]
    rows = list(timed.values())
    if device() == "cpu":
        what = f"a whole decode step of {name} at {context} tokens"
        rows.append(_against_peer(what, times, STEP_FASTER))
    return rows


def _against_peer(what: str, times: dict[str, float], limit: float) -> Row:
    """Return how many times faster than the peer ours is; without a ratio where it is absent."""
    if PEER not in times:
        return at_least(f"{what}: {PEER} is not installed", None, limit, "x faster")
    return at_least(f"{what}: {PEER} over ours", times[PEER] / times[OURS], limit, "x faster")


def _peer_caches(model: Any, shape: tuple[int, int], tokens: int) -> list[Any]:
    """Return the peer's caches, one a layer, behind ``tokens`` tokens of random K and V.

    It holds fp16 K and V that it has rounded. They are put there as they are: its own prefill would
    take an SVD with one left vector a token.
    """
    peer = import_module(PEER_MODULE)
    caches = peer.KVCacheBuilder.for_model(model, peer.KVCacheConfig(**PEER_SETTINGS))
    heads, head_dim = shape
    for index, cache in enumerate(caches):
        size = (2, 1, heads, tokens, head_dim)
        keys, values = mx.random.normal(size, dtype=mx.float16, key=mx.random.key(index))
        KVCache.update_and_fetch(cache, keys, values)
        mx.eval(cache.state)
    return caches


def _one_layer(model: Any, options: Options, dtype: mx.Dtype) -> list[Row]:
    """Return the time of an update of one layer, and of update and attention; ours and the peer's.

    ``model`` lends the place where a llama of mlx-lm attends; shapes are the layer's own.
    """
    context = options.context or CONTEXT
    rows: list[Row] = []
    for what, step in (("an update", _update), ("update and attention", _attend)):
        with caches_of(OURS, model) as (own, *_):
            fill([own], LAYER_SHAPE, context, dtype, options.fill)
            caches = {OURS: own}
            if find_spec(PEER_MODULE):
                caches[PEER] = _peer_caches(model, LAYER_SHAPE, context)[0]
            runs = {kind: partial(step, cache, dtype) for kind, cache in caches.items()}
            timed = in_turns(runs, options.repeats or REPEATS, STEPS)
        heads, head_dim = LAYER_SHAPE
        name = f"{what} of one layer at {context} tokens, {heads} KV heads, D={head_dim}"
        times = {kind: row["median_ms"] for kind, row in timed.items()}
        rows += [row | {"name": f"{kind}: {name}"} for kind, row in timed.items()]
        rows.append(_against_peer(name, times, UPDATE_FASTER if step is _update else STEP_FASTER))
    return rows


def _new(dtype: mx.Dtype, heads: int) -> mx.array:
    """Return random vectors [1, heads, 1, D] of one token."""
    return mx.random.normal((1, heads, 1, LAYER_SHAPE[1]), dtype=dtype, key=mx.random.key(heads))


def _update(cache: Any, dtype: mx.Dtype) -> None:
    """Bring one token after another into ``cache`` and compute what each changes."""
    new = _new(dtype, LAYER_SHAPE[0])
    for _ in range(STEPS):
        cache.update_and_fetch(new, new)
        held = cache.buffer.arrays if isinstance(cache, GearCache) else [cache.keys, cache.values]
        mx.eval(held)
    mx.eval(cache.state)


def _attend(cache: Any, dtype: mx.Dtype) -> None:
    """Bring one token after another into ``cache`` and attend as a llama of mlx-lm does."""
    new, queries = _new(dtype, LAYER_SHAPE[0]), _new(dtype, QUERY_HEADS)
    for _ in range(STEPS):
        keys, values = cache.update_and_fetch(new, new)
        # looked up at each call, as a model does: GEAR's route replaces it
        attention = llama.scaled_dot_product_attention  # pyright: ignore[reportPrivateImportUsage]
        scale = LAYER_SHAPE[1] ** -0.5
        mx.eval(attention(queries, keys, values, cache=cache, scale=scale, mask=None))
