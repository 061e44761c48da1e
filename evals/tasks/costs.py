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
