"""What a walk costs: seconds and peak memory while it runs, bytes of what it leaves behind.

Bytes are the caches' own summary at each window's end, after a flush; the metrics are sums over
windows, so KV size % is a ratio of sums. Speeds taken here are honest but not a benchmark: only
``eval=efficiency`` warms up and may enter a table.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from evals.caches import Caches

Sample = dict[str, Any]
_SUMMED = ("stored", "accounted", "buffer", "held", "fp16", "prefill", "generated")


def class_counts(caches: Caches) -> dict[str, int]:
    """Return how many layers have a cache of each class, by name."""
    return dict(sorted(Counter(caches.class_names()).items()))


class Meter:
    """Seconds by phase, and the highest memory of any phase over what was held at the start."""

    def __init__(self) -> None:
        self.base_bytes = mx.get_active_memory()
        self.peak_bytes = 0
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase, adding to earlier ones of its name; evaluate its outputs inside."""
        mx.reset_peak_memory()
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.peak_bytes = max(self.peak_bytes, mx.get_peak_memory() - self.base_bytes)


def _rate(samples: Sequence[Sample], tokens: str, seconds: str) -> float | None:
    """Return tokens per second over all samples; ``None`` where one was not measured."""
    timings = [sample["timing"] for sample in samples]
    if any(timing[seconds] is None for timing in timings):
        return None
    return sum(timing[tokens] for timing in timings) / sum(timing[seconds] for timing in timings)


def cost_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return ``kv/*``, ``speed/*``, ``mem/*`` and ``guard/tokens_compressed`` of a run.

    ``speed/prefill_tok_per_s`` is absent when a prefill was reused, ``speed/compress_ms`` (mean
    over windows of compressing one prefill at once) where none was.
    """
    kv = [sample["kv"] for sample in samples]
    metrics: dict[str, float] = {
        f"kv/{name}_bytes": sum(summary[f"{name}_bytes"] for summary in kv) for name in _SUMMED
    }
    metrics["kv/size_pct"] = 100 * metrics["kv/stored_bytes"] / metrics["kv/fp16_bytes"]
    for term in kv[0]["terms"]:
        metrics[f"kv/{term}_bytes"] = sum(summary["terms"][term] for summary in kv)
    metrics["guard/tokens_compressed"] = min(summary["tokens_compressed_min"] for summary in kv)
    metrics["mem/peak_bytes"] = max(sample["peak_bytes"] for sample in samples)
    speeds = {
        "speed/prefill_tok_per_s": _rate(samples, "prefill_tokens", "prefill_s"),
        "speed/decode_tok_per_s": _rate(samples, "fed_tokens", "score_s"),
    }
    compress = [s for sample in samples if (s := sample["timing"]["compress_s"]) is not None]
    if compress:
        speeds["speed/compress_ms"] = 1000 * sum(compress) / len(compress)
    return metrics | {name: value for name, value in speeds.items() if value is not None}


def merged_costs(costs: Sequence[Sample]) -> Sample:
    """Return the cost of one item that took several walks: sums, the highest peak, the least."""
    if len(costs) == 1:
        return costs[0]
    kv = [cost["kv"] for cost in costs]
    timing = [cost["timing"] for cost in costs]
    classes = [cost["cache_classes"] for cost in costs]
    summed = {name: sum(k[name] for k in kv) for name in kv[0] if name.endswith("_bytes")}
    return {
        **{n: sum(c[n] for c in costs) for n in ("tokens", "context_tokens", "context_compressed")},
        "kv": {
            **summed,
            "tokens_compressed_min": min(k["tokens_compressed_min"] for k in kv),
            "terms": {term: sum(k["terms"][term] for k in kv) for term in kv[0]["terms"]},
            "per_layer": [
                _merged_layer(layers) for layers in zip(*(k["per_layer"] for k in kv), strict=True)
            ],
        },
        "cache_classes": next((c for c in classes if c["before"] != c["after"]), classes[0]),
        "timing": {name: _sum([t[name] for t in timing]) for name in timing[0]},
        "peak_bytes": max(cost["peak_bytes"] for cost in costs),
    }


def _sum(parts: Sequence[float | None]) -> float | None:
    """Return a sum; ``None`` where one part was not measured."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _merged_layer(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one layer's bytes over several walks."""
    sizes = ("stored_bytes", "fp16_bytes")
    return {**layers[0], **{name: sum(layer[name] for layer in layers) for name in sizes}}
