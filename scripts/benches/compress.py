"""One block of K and of V, [1, 8, 2048, 128], r = 4, s = 2%: time, peak, against the full SVD."""

from __future__ import annotations

import mlx.core as mx

from benches.timing import Options, Row, at_least, at_most, device, peak_bytes, row
from gear.codec import compress
from gear.config import GearConfig, resolve
from gear.lowrank import low_rank

SHAPE = (1, 8, 2048, 128)
REPEATS = 40


def run(options: Options) -> list[Row]:
    """Time the low-rank solver and whole blocks, and measure the peak over one layer's K and V."""
    repeats = options.repeats or REPEATS
    x = mx.random.normal(SHAPE, key=mx.random.key(0))
    mx.eval(x)
    layer = resolve(GearConfig(), 1)[0]
    rows = [row("low rank, power", lambda: mx.eval(low_rank(x, 4)), repeats)]
    bar = "" if device() == "cpu" else "at most 2 ms"
    rows += [
        row(f"block of {s.upper()}", lambda s=s: compress(x, s, layer.k, layer, 4), repeats, bar)
        for s in "kv"
    ]
    both = peak_bytes(lambda: [compress(x, s, layer.k, layer, 4) for s in "kv"])
    memory = at_most("peak of one layer over its K and V in fp32", both / (2 * x.nbytes), 4)
    if device() == "cpu":
        rows += _against_svd(x, {r["name"]: r["median_ms"] for r in rows})
    return [*rows, memory]


def _against_svd(x: mx.array, fast: dict[str, float]) -> list[Row]:
    """Time the full SVD on ``x``, and return how many times faster ``fast`` is."""
    slow = resolve(GearConfig(solver="svd"), 1)[0]
    rows = [row("low rank, full SVD", lambda: mx.eval(low_rank(x, 4, solver="svd")), 2)]
    rows += [
        row(f"block of {s.upper()}, full SVD", lambda s=s: compress(x, s, slow.k, slow, 4), 2)
        for s in "kv"
    ]
    full = {r["name"].removesuffix(", full SVD"): r["median_ms"] for r in rows}
    for name, limit in (("low rank, power", 100), ("block of K", 10), ("block of V", 10)):
        ratio = full[name.removesuffix(", power")] / fast[name]
        rows.append(at_least(f"{name}: times faster than with the SVD", ratio, limit))
    return rows
