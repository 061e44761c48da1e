"""Measure speed and memory; every claim of a ratio is two timings of one run.

    python scripts/bench.py compress            # one block: low rank against SVD, time, peak memory

Prints a table and writes JSON (``--out``). Timings are medians over repeats after a warm-up, with
the interquartile range; outputs are evaluated before the clock stops.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evals.blas import load_optimised_blas

BLAS = load_optimised_blas()

import mlx.core as mx  # noqa: E402 - the BLAS must be loaded before MLX

from gear.codec import compress  # noqa: E402
from gear.config import GearConfig, resolve  # noqa: E402
from gear.lowrank import low_rank  # noqa: E402

Row = dict[str, Any]


def timed(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Return the median and the interquartile range, in ms, of ``run`` (which must evaluate)."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        mx.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return statistics.median(times), high - low


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the peak memory of ``run`` above what was active before it."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before


def row(name: str, run: Callable[[], Any], repeats: int, bar: str = "") -> Row:
    """Return one timed line of the table."""
    median, spread = timed(run, repeats)
    return {"name": name, "median_ms": median, "iqr_ms": spread, "bar": bar}


def bench_compress(repeats: int) -> list[Row]:
    """One block of K and of V, [1, 8, 2048, 128], r = 4, s = 2%, against the full SVD."""
    x = mx.random.normal((1, 8, 2048, 128), key=mx.random.key(0))
    mx.eval(x)
    layer = resolve(GearConfig(), 1)[0]
    rows = [row("low rank, power", lambda: mx.eval(low_rank(x, 4)), repeats)]
    rows += [
        row(f"block of {s.upper()}", lambda s=s: compress(x, s, layer.k, layer, 4), repeats)
        for s in "kv"
    ]
    both = peak_bytes(lambda: [compress(x, s, layer.k, layer, 4) for s in "kv"])
    memory = {"name": "peak of one layer over its K and V in fp32", "ratio": both / (2 * x.nbytes),
              "bar": "at most 4"}  # fmt: skip
    if mx.default_device() == mx.Device(mx.cpu, 0):
        slow = resolve(GearConfig(solver="svd"), 1)[0]
        rows.append(row("low rank, full SVD", lambda: mx.eval(low_rank(x, 4, solver="svd")), 2))
        rows += [
            row(f"block of {side.upper()}, full SVD",
                lambda side=side: compress(x, side, slow.k, slow, 4), 2)
            for side in "kv"
        ]  # fmt: skip
        by_name = {r["name"]: r["median_ms"] for r in rows}
        for fast, bar in (("low rank, power", "at least 100"), ("block of K", "at least 10"),
                          ("block of V", "at least 10")):  # fmt: skip
            full = fast.replace(", power", "") + ", full SVD"
            rows.append({"name": f"{fast}: times faster than with the SVD",
                         "ratio": by_name[full] / by_name[fast], "bar": bar})  # fmt: skip
    else:
        for r in rows[1:3]:
            r["bar"] = "at most 2 ms"
    return [*rows, memory]


BENCHES: dict[str, Callable[[int], list[Row]]] = {"compress": bench_compress}


def environment() -> dict[str, str]:
    """Return what the numbers depend on."""
    return {
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "blas": BLAS,
    }


def show(title: str, rows: list[Row]) -> None:
    """Print a bench's rows."""
    table = Table("what", "median ms", "iqr ms", "ratio", "bar", title=title)
    for r in rows:
        cells = [f"{r[k]:.3f}" if k in r else "" for k in ("median_ms", "iqr_ms", "ratio")]
        table.add_row(r["name"], *cells, r["bar"])
    Console().print(table)


def main() -> int:
    """Run the benches named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("bench", nargs="+", choices=sorted(BENCHES))
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    results = {name: BENCHES[name](args.repeats) for name in args.bench}
    for name, rows in results.items():
        show(name, rows)
    if args.out:
        args.out.write_text(
            json.dumps({"environment": environment(), "results": results}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
