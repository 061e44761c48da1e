"""Reconstruction error of a prefill's K and V, by layer and head.

Real K and V of P tokens, exact, are compressed at once and rebuilt; the error of one head is
||X - X'||_F / ||X||_F over its [tokens, head_dim], tokens that wait exact in the buffer included.
No perplexity, and no fp16 arm: the exact prefill is the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from evals.prefill import hand_over
from evals.tasks.base import Context
from evals.tasks.costs import Meter, Sample, class_counts, cost_metrics
from evals.tasks.fidelity import floats
from evals.windows import Window


def relative_error(exact: mx.array, rebuilt: mx.array) -> list[float]:
    """Return ||X - X'||_F / ||X||_F of each head of [1, kv_heads, tokens, head_dim], 0 for 0/0."""
    exact = exact.astype(mx.float32)
    error = mx.linalg.norm((exact - rebuilt.astype(mx.float32)).flatten(2), axis=-1)
    size = mx.linalg.norm(exact.flatten(2), axis=-1)
    return floats(mx.where(error == 0, 0.0, error / size)[0])


def _sample(ctx: Context, window: Window) -> Sample:
    """Compress one window's prefill and compare it layer by layer."""
    meter, caches = Meter(), ctx.make_caches()
    before = class_counts(caches)
    with meter.phase("prefill"):
        state, reused = ctx.prefills.prefill(
            ctx.model, window.prefill, ctx.eval.prefill_chunk, window=caches.query_window
        )
    with meter.phase("compress"):
        hand_over(state, caches)
    kv, layers = caches.bytes(), []
    for index in caches.covered:
        pairs = zip(
            state.layers[index].keys_and_values(), caches.layers[index].reconstruct(), strict=True
        )
        k, v = (relative_error(exact, rebuilt) for exact, rebuilt in pairs)
        layers.append({"layer": index, "k_rel_err": k, "v_rel_err": v})
    return {
        "document": window.document,
        "window": window.index,
        "tokens": state.tokens,
        "layers": layers,
        "kv": kv,
        "cache_classes": {"before": before, "after": class_counts(caches)},
        "timing": {
            "prefill_tokens": state.tokens,
            "prefill_s": None if reused else meter.seconds["prefill"],
            "compress_s": meter.seconds["compress"],
            "fed_tokens": 0,
            "score_s": None,
        },
        "peak_bytes": meter.peak_bytes,
    }


class Reconstruction:
    """``eval=reconstruction``."""

    def resumable(self, samples: Sequence[Sample], ctx: Context) -> Sequence[Sample]:
        """Return none: windows are few, and a killed run begins anew."""
        return ()

    def samples(self, ctx: Context) -> Iterator[Sample]:
        """Yield one sample a window: per layer the k_rel_err and v_rel_err by head; its cost."""
        walked = 0
        for done, window in enumerate(ctx.windows, start=1):
            sample = _sample(ctx, window)
            walked += sample["tokens"]
            yield sample
            ctx.progress(done, len(ctx.windows), walked)

    def metrics(self, samples: Sequence[Sample], ctx: Context) -> dict[str, float]:
        """Return the mean errors over windows, layers and heads, and the costs."""
        errors = {
            f"reconstruction/{side}_rel_err": float(
                np.mean([layer[f"{side}_rel_err"] for s in samples for layer in s["layers"]])
            )
            for side in ("k", "v")
        }
        return {**errors, **cost_metrics(samples)}
