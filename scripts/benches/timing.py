"""Timings and peaks, and the rows that carry them.

A timing is a median over repeats after a warm-up, in ms, with the interquartile range; outputs are
evaluated before the clock stops. What is compared runs in turns within one process, so that a slow
moment of the machine falls on all alike. A row is a plain dict: ``name``, ``bar`` ("" without one)
and, where measured, ``median_ms``, ``iqr_ms``, ``mib``, ``tok_per_s``, ``ratio``, ``met``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from gear.placement import on_cpu

Row = dict[str, Any]
Run = Callable[[], Any]
MIB = 2**20


@dataclass(frozen=True)
class Options:
    """What the command line sets; None is a bench's own default."""

    repeats: int | None = None
    tokens: tuple[int, ...] | None = None
    """attention: tokens in the cache."""
    fill: int = 2048
    """Tokens of a call while a cache is filled: the length of a prefill block."""
    context: int | None = None
    """memory, decode: tokens in the cache."""
    chunk: int = 2048
    """memory: tokens of a prefill call."""
    layers: int | None = None
    """memory, decode: layers of the model with random weights."""
    dtype: str | None = None
    """attention, memory, decode: float32, float16 or bfloat16."""
    limit: int | None = None
    """sweep: documents (`dataset.limit`); soak: jobs."""
    plot: Path | None = None
    """soak: where to draw its curves."""
    all_separate: bool = False
    """sweep: run every point separately too, not three of them."""


def device() -> str:
    """Return "cpu", or "gpu" for Metal and CUDA."""
    return "cpu" if on_cpu() else "gpu"


def in_turns(runs: Mapping[str, Run], repeats: int, calls: int = 1) -> dict[str, Row]:
    """Return one timed row for each of ``runs``, taken in turns.

    A run must evaluate what it computes; its time is divided by ``calls``, the number of like
    steps in it.
    """
    for run in runs.values():
        run()
    mx.synchronize()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            mx.synchronize()
            times[name].append(1e3 * (time.perf_counter() - start) / calls)
    return {name: _row(name, found) for name, found in times.items()}


def _row(name: str, times: list[float]) -> Row:
    """Return the row of a list of times in ms."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {"name": name, "median_ms": statistics.median(times), "iqr_ms": high - low, "bar": ""}


def row(name: str, run: Run, repeats: int, bar: str = "") -> Row:
    """Return one timed line of the table."""
    return {**in_turns({name: run}, repeats)[name], "bar": bar}


def at_most(name: str, ratio: float | None, limit: float, unit: str = "") -> Row:
    """Return a row whose ``ratio`` must not be above ``limit``; None is a ratio not measured."""
    return _judged(name, ratio, f"at most {limit:g}{unit}", ratio is not None and ratio <= limit)


def at_least(name: str, ratio: float | None, limit: float, unit: str = "") -> Row:
    """Return a row whose ``ratio`` must not be below ``limit``; None is a ratio not measured."""
    return _judged(name, ratio, f"at least {limit:g}{unit}", ratio is not None and ratio >= limit)


def _judged(name: str, ratio: float | None, bar: str, met: bool) -> Row:
    """Return a row with a bar; without a ratio it is neither met nor missed."""
    if ratio is None:
        return {"name": name, "bar": bar}
    return {"name": name, "ratio": ratio, "bar": bar, "met": met}


def peak_bytes(run: Run, before: int | None = None) -> int:
    """Return the peak memory of ``run`` above ``before``, by default what is active now."""
    mx.clear_cache()
    base = mx.get_active_memory() if before is None else before
    mx.reset_peak_memory()
    run()
    mx.synchronize()
    return mx.get_peak_memory() - base
