"""Samples as the tasks write them, nothing computed, and records to go with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evals import record as store
from tests.evals.fake_records import Record, finished

HOSTILE = '<script>alert("$x_{$ & 1")</script> ‮日本 \x07 $\\frac{$'
"""A name that is markup to a browser and a broken formula to matplotlib."""


def kl_samples(*windows: tuple[str, Sequence[float]]) -> list[Record]:
    """Return perplexity samples of (document, KL of each scored token)."""
    return [{"document": name, "window": 0, "kl": list(kl)} for name, kl in windows]


def error_samples(*windows: dict[int, tuple[list[float], list[float]]]) -> list[Record]:
    """Return reconstruction samples of {layer: (errors of K's heads, errors of V's)}."""
    return [
        {"layers": [{"layer": i, "k_rel_err": k, "v_rel_err": v} for i, (k, v) in layers.items()]}
        for layers in windows
    ]


def retrieved(length: int, depth: float | None, *right: float) -> list[Record]:
    """Return samples of one cell."""
    return [{"length": length, "depth": depth, "scores": {"acc": value}} for value in right]


def asked(lengths: list[int], depths: list[float] | None, cache: str = "gear") -> Record:
    """Return a retrieval record."""
    return finished(cache, dataset={"name": "passkey", "lengths": lengths, "depths": depths})


def reconstruction(cache: str = "gear", **given: Any) -> Record:
    """Return a reconstruction record with mean errors of 0.25 (K) and 0.5 (V)."""
    task = {"name": "reconstruction", "task": "reconstruction"}
    record = finished(cache, **{"eval": task, **given})
    errors = {"reconstruction/k_rel_err": 0.25, "reconstruction/v_rel_err": 0.5}
    costs = {k: v for k, v in record["metrics"].items() if k.startswith("kv/")}
    return {**record, "metrics": {**errors, **costs}}


def scored(cache: str, score: float, stored: int) -> Record:
    """Return a downstream record: its accuracy with an interval of 0.1 on both sides."""
    record = finished(
        cache,
        dataset={"name": "arc_easy", "task": "arc_easy", "metric": "acc"},
        eval={"name": "downstream", "task": "downstream"},
    )
    ends = {"": score, "_low": score - 0.1, "_high": score + 0.1}
    metrics = {f"quality/acc/arc_easy{end}": value for end, value in ends.items()}
    sizes = {"kv/stored_bytes": stored, "kv/fp16_bytes": 2_000_000}
    return {**record, "metrics": {**metrics, **sizes}}


def renamed(record: Record, cache: str) -> Record:
    """Return the record with another name of its method."""
    config = {**record["config"], "cache": {**record["config"]["cache"], "name": cache}}
    return {**record, "config": config, "key": store.run_key(config)}


def none(_: str) -> list[Record]:
    """Return no samples for any key."""
    return []
