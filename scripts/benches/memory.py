"""Peak memory above the weights at a long context: decode and prefill, every cache against fp16's.

The shape of llama-3.2-1B with random weights; ``mib`` is the peak minus the active memory with only
the weights loaded. Decode: a few tokens behind a full cache, among which fp16's cache grows by its
step and GEAR forms a block. Prefill: ``--context`` tokens in chunks of ``--chunk`` through the
cache (each chunk sees the compressed past), only the caches evaluated, as mlx-lm does. On a CPU
the last chunk is run behind random K and V, among mlx-lm's quantized caches with the 4-bit one
alone; in float32, because half precision is emulated there (fp16's own cache then takes 4 bytes an
element, beside scores of some GiB).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx

from benches.llama import KINDS, build, caches_of, fill, kv_shape
from benches.timing import MIB, Options, Row, at_most, device, peak_bytes

CONTEXT = 32768
STEPS = 4
SHORT_OF_CONTEXT = 2  # GEAR's buffer then holds n_b - 2: the third of the STEPS forms a block
BARS = {"decode": 0.40, "prefill": 0.60}


def run(options: Options) -> list[Row]:
    """Measure both phases with every kind of cache."""
    rows = []
    for phase in BARS:
        half = phase == "decode" or device() == "gpu"
        dtype = getattr(mx, options.dtype or ("float16" if half else "float32"))
        rows += _phase(phase, options, dtype)
    return rows


def _phase(phase: str, options: Options, dtype: mx.Dtype) -> list[Row]:
    """Return the rows of one phase: each kind's peak, and GEAR's over the fp16 cache's."""
    model = build(options.layers, dtype)
    context, what = options.context or CONTEXT, str(dtype).rpartition(".")[2]
    name = f"{phase} at {context} tokens, {len(model.layers)} layers in {what}"
    weights = mx.get_active_memory()
    peaks, refused = {}, []
    for kind in _kinds(phase):
        try:
            peaks[kind] = _peak(phase, model, kind, options, weights)
        except RuntimeError:
            if not kind.startswith("mlx-lm"):
                raise
            refused.append(kind)  # MLX has no kernel for some of its shapes on some backends
        mx.clear_cache()
    rows: list[Row] = [
        {"name": f"{kind}: {name}", "mib": peak / MIB, "ratio": peak / peaks["fp16"], "bar": ""}
        for kind, peak in peaks.items()
    ]
    rows += [{"name": f"{kind}: {name}: refused by MLX here", "bar": ""} for kind in refused]
    ratio = peaks["GEAR 2-bit"] / peaks["fp16"]
    return [*rows, at_most(f"GEAR 2-bit's peak over fp16's: {name}", ratio, BARS[phase], "x")]


def _kinds(phase: str) -> list[str]:
    """Return the caches that a phase measures: a CPU takes minutes for one chunk at 32k tokens."""
    slow = phase == "prefill" and device() == "cpu"
    left_out = ("mlx-lm quantized, 2 bits", "mlx-lm quantized, 8 bits") if slow else ()
    return [kind for kind in KINDS if kind not in left_out]


def _peak(phase: str, model: Any, kind: str, options: Options, weights: int) -> int:
    """Return the peak above ``weights`` bytes of one phase with caches of ``kind``."""
    context, chunk, shape = options.context or CONTEXT, options.chunk, kv_shape(model)
    dtype = model.layers[0].self_attn.q_proj.weight.dtype
    with caches_of(kind, model) as caches:
        if phase == "decode":
            fill(caches, shape, context - SHORT_OF_CONTEXT, dtype, options.fill)
            return peak_bytes(partial(decode, model, caches), weights)
        filled = max(context - chunk, 0) if device() == "cpu" else 0
        fill(caches, shape, filled, dtype, chunk, flushed=False)
        return peak_bytes(partial(prefill, model, caches, context - filled, chunk), weights)


def decode(model: Any, caches: list[Any], steps: int = STEPS) -> None:
    """Feed ``steps`` tokens, each the likeliest after the one before."""
    token = mx.array([[1]])
    for _ in range(steps):
        token = model(token, cache=caches)[:, -1:].argmax(-1)
        mx.eval(token)


def prefill(model: Any, caches: list[Any], tokens: int, chunk: int) -> None:
    """Feed ``tokens`` random tokens, ``chunk`` a call, evaluating what the caches hold."""
    for start in range(0, tokens, chunk):
        shape = (1, min(chunk, tokens - start))
        ids = mx.random.randint(0, model.args.vocab_size, shape, key=mx.random.key(start))
        model(ids, cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
