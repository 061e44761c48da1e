"""Attention of one query and of a chunk of 64 over N tokens: GEAR as it is stored against exact.

One layer of H = 32 query heads, 8 KV heads, D = 128, random K and V; fp32 on a CPU, fp16 on a GPU.
Beside `mx.fast.scaled_dot_product_attention` on K and V as they are: mlx-lm's quantized attention
at 2, 4 and 8 bits, and GEAR at 2 bits with s = 2% and s = 0, its newest 64 tokens in the buffer
and the rest compressed in blocks of ``--fill`` tokens. ``ratio`` is the time over the exact one's.
On a GPU a timing chains many calls, because in a model launches overlap with the work before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from benches.timing import Options, Row, Run, at_least, at_most, device, in_turns
from gear.attention import attend
from gear.cache import GearCache
from gear.config import GearConfig, resolve

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
QUERIES = (1, 64)
TOKENS = {"cpu": (1024, 8192, 32768), "gpu": (1024, 8192, 32768, 65536)}
BAR_TOKENS = {"cpu": 8192, "gpu": 65536}
BITS = (2, 4, 8)
SPARSE_FRACS = (0.02, 0.0)
SLOWEST = {1: 3.0, 64: 1.7}
"""CPU: the most of the exact time by the number of queries, at s = 2%."""
FASTEST = {0.02: 1.5, 0.0: 2.0}
"""GPU, one query: how many times faster than exact, by s."""
CHAINED = {"cpu": 1, "gpu": 20}
REPEATS = 20
SCALE = HEAD_DIM**-0.5

Attend = Callable[[mx.array], mx.array]
"""Queries [1, H, L, D] to outputs of the same shape."""


def run(options: Options) -> list[Row]:
    """Time every kind of attention at every N and number of queries."""
    where = device()
    dtype = getattr(mx, options.dtype or {"cpu": "float32", "gpu": "float16"}[where])
    rows = []
    for tokens in options.tokens or TOKENS[where]:
        kinds = _kinds(tokens, dtype, options.fill)
        for length in QUERIES:
            rows += _timed(kinds, tokens, length, dtype, options.repeats or REPEATS)
        kinds.clear()
        mx.clear_cache()
    return rows


def gear_name(sparse_frac: float) -> str:
    """Return GEAR's name in a row."""
    return f"GEAR 2-bit, s={sparse_frac:.0%}"


def _kinds(tokens: int, dtype: mx.Dtype, fill: int) -> dict[str, Callable[..., mx.array]]:
    """Return each attention over the same ``tokens`` tokens, called with queries and mask."""
    shape = (1, KV_HEADS, tokens, HEAD_DIM)
    keys, values = (mx.random.normal(shape, dtype=dtype, key=mx.random.key(i)) for i in (1, 2))
    mx.eval(keys, values)
    kinds = {"exact": partial(_exact, keys, values)}
    for bits in BITS:
        codes = [mx.quantize(x, group_size=64, bits=bits) for x in (keys, values)]
        mx.eval(codes)
        kinds[f"mlx-lm quantized, {bits} bits"] = partial(_quantized, codes, bits)
    for sparse_frac in SPARSE_FRACS:
        cache = _filled(keys, values, sparse_frac, fill)
        kinds[gear_name(sparse_frac)] = partial(_gear, cache)
    return kinds


def _filled(keys: mx.array, values: mx.array, sparse_frac: float, fill: int) -> GearCache:
    """Return a cache of K and V whose newest n_b tokens are still in the buffer."""
    settings = resolve(GearConfig(sparse_frac=sparse_frac), 1)[0]
    cache = GearCache(settings)
    end = keys.shape[2] - settings.n_b
    for start in range(0, end, fill):
        stop = min(start + fill, end)
        cache.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop])
        cache.flush()
    cache.update_and_fetch(keys[:, :, end:], values[:, :, end:])
    mx.eval(cache.state)
    return cache


def _exact(
    keys: mx.array, values: mx.array, queries: mx.array, mask: str | None = None
) -> mx.array:
    """Attend to K and V as they are."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)


def _quantized(
    codes: list[tuple[mx.array, ...]], bits: int, queries: mx.array, mask: str | None = None
) -> mx.array:
    """Attend as mlx-lm does over its quantized cache (it scales its queries in place: a copy)."""
    keys, values = codes
    attention = quantized_scaled_dot_product_attention
    return attention(mx.array(queries), keys, values, SCALE, mask, group_size=64, bits=bits)  # pyright: ignore[reportArgumentType]


def _gear(cache: GearCache, queries: mx.array, mask: str | None = None) -> mx.array:
    """Attend to what a GEAR cache holds."""
    return attend(queries, cache, SCALE, mask)


def _timed(
    kinds: dict[str, Callable[..., mx.array]],
    tokens: int,
    length: int,
    dtype: mx.Dtype,
    repeats: int,
) -> list[Row]:
    """Return the rows of ``length`` queries over ``tokens`` tokens."""
    shape = (1, QUERY_HEADS, length, HEAD_DIM)
    queries = mx.random.normal(shape, dtype=dtype, key=mx.random.key(3))
    mx.eval(queries)
    calls, mask = CHAINED[device()], None if length == 1 else "causal"

    def chained(attention: Callable[..., mx.array]) -> None:
        out = queries
        for _ in range(calls):
            out = attention(out, mask)
        mx.eval(out)

    runs = {n: partial(chained, a) for n, a in kinds.items()}
    refused = [name for name, run in runs.items() if name.startswith("mlx-lm") and _refuses(run)]
    for name in refused:
        del runs[name]
    timed = in_turns(runs, repeats, calls)
    what = f"{'one query' if length == 1 else f'a chunk of {length}'}, N={tokens}"
    for row in timed.values():
        row["ratio"] = row["median_ms"] / timed["exact"]["median_ms"]
    bars = _bars(timed, tokens, length)
    for row in timed.values():
        row["name"] += f": {what}"
    missing: list[Row] = [
        {"name": f"{name}: {what}: refused by MLX here", "bar": ""} for name in refused
    ]
    return [*timed.values(), *missing, *bars]


def _refuses(run: Run) -> bool:
    """Say whether MLX has no kernel for one of the shapes on this backend."""
    try:
        run()
    except RuntimeError:
        return True
    return False


def _bars(timed: dict[str, Row], tokens: int, length: int) -> list[Row]:
    """Return the rows that have a bar, at the N where there is one."""
    where = device()
    if tokens != BAR_TOKENS[where]:
        return []
    if where == "cpu":
        ratio = timed[gear_name(0.02)]["ratio"]
        what = "one query" if length == 1 else f"a chunk of {length}"
        name = f"{gear_name(0.02)}: {what}, N={tokens}, its time over the exact one's"
        return [at_most(name, ratio, SLOWEST[length], "x")]
    if length > 1:
        return []
    return [
        at_least(f"{gear_name(s)}: one query, N={tokens}, times faster than exact",
                 1 / timed[gear_name(s)]["ratio"], FASTEST[s], "x")
        for s in SPARSE_FRACS
    ]  # fmt: skip
