"""The walk of one window: prefill, hand-over, then the scored tokens in calls (no scores here).

A pass cannot see a cache that is exact for its own tokens, so what is scored must come in calls of
its own. They end at block boundaries: with the rule of time (compress at the start of the next
call) this meets the same states as token by token, n_b times cheaper.

- decode: the first call fills the buffer up to n_b + recent, then n_b a call; ``eval.chunk`` or 64
  where the method has no n_b.
- prefix: the scored tokens in one call after the prefill was compressed; bytes from before it.
- oneshot: prefill and scored tokens in one call; equals fp16 for exact attention (sanity check).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from evals.caches import Caches
from evals.prefill import evaluate, hand_over
from evals.tasks.base import Context
from evals.tasks.costs import Meter, Sample, class_counts
from evals.windows import Window
from gear.methods import Method
from gear.methods.family import GearFamily

DEFAULT_CHUNK = 64
Read = Callable[[mx.array], None]
"""Takes the fp32 log-probabilities [tokens, vocabulary] of the next scored tokens."""


@dataclass(frozen=True)
class Arm:
    """A method and its fresh caches for one window."""

    method: Method
    caches: Caches


def exact_arm(ctx: Context) -> Arm:
    """Return the fp16 arm with fresh caches."""
    return Arm(ctx.exact_method, ctx.make_exact_caches())


def call_lengths(total: int, n_b: int, room: int) -> list[int]:
    """Return the lengths of the calls that feed ``total`` tokens and end at block boundaries.

    ``room`` is what the buffer takes until it is full. A call never brings more than n_b tokens,
    because a longer one counts as prefill and would be compressed at the prefill's rank.
    """
    lengths = []
    while total:
        length = min(n_b, room, total)
        lengths.append(length)
        total -= length
        room = room - length or n_b
    return lengths


def _schedule(arm: Arm, chunk: int | None, total: int) -> list[int]:
    """Return the lengths of decode's calls, from what the caches hold after the prefill."""
    n_b = arm.method.block_tokens()
    if chunk is not None or n_b is None or not arm.caches.covered:
        length = chunk or DEFAULT_CHUNK
        return call_lengths(total, length, length)
    cache = arm.caches.layers[arm.caches.covered[0]]
    sinks = arm.method.settings.n_sink if isinstance(arm.method, GearFamily) else 0
    room = max(0, sinks - cache.offset) + n_b + arm.method.recent_tokens() - cache.buffered_tokens
    return call_lengths(total, n_b, room)


def _prefill(ctx: Context, tokens: list[int], caches: Caches, meter: Meter) -> None:
    """Bring the prefill into the caches, compressed; its phases are prefill and compress."""
    if not tokens:
        return
    if ctx.eval.prefill == "exact":
        with meter.phase("prefill"):
            state, reused = ctx.prefills.prefill(ctx.model, tokens, ctx.eval.prefill_chunk)
        if reused:
            del meter.seconds["prefill"]
            meter.base_bytes -= state.nbytes
        with meter.phase("compress"):
            hand_over(state, caches)
        return
    with meter.phase("prefill"):
        for start in range(0, len(tokens), ctx.eval.prefill_chunk):
            part = mx.array(tokens[start : start + ctx.eval.prefill_chunk])
            ctx.model(part[None], cache=caches.layers)
            evaluate(caches.layers)
        caches.flush()
        evaluate(caches.layers)


def _score(
    ctx: Context, fed: list[int], lengths: list[int], caches: Caches, meter: Meter
) -> Iterator[mx.array]:
    """Feed tokens in calls of the given lengths; yield each call's logits [length, vocabulary]."""
    start = 0
    for length in lengths:
        tokens = mx.array(fed[start : start + length])
        start += length
        with meter.phase("score"):
            logits = ctx.model(tokens[None], cache=caches.layers)[0]
            mx.eval(logits)
        yield logits


def walk(ctx: Context, window: Window, arm: Arm, read: Read, protocol: str) -> Sample:
    """Walk one window with fresh caches and return its cost: kv, classes, timing, peak_bytes.

    ``read`` gets the log-probabilities of the T scored tokens, in order, in one or more pieces.
    """
    caches, meter, kv = arm.caches, Meter(), None
    before = class_counts(caches)
    fed, lengths = window.fed, [len(window.fed)]
    if protocol == "oneshot":
        fed, lengths = [*window.prefill, *fed], [len(window.prefill) + len(fed)]
    else:
        _prefill(ctx, window.prefill, caches, meter)
    if protocol == "prefix":
        kv = caches.bytes()
    elif protocol == "decode":
        lengths = _schedule(arm, ctx.eval.chunk, len(fed))
    for logits in _score(ctx, fed, lengths, caches, meter):
        # one-shot logits hold the prefill's too; elsewhere a call is never longer than T
        read(nn.log_softmax(logits[-len(window.fed) :].astype(mx.float32)))
    if kv is None:
        caches.flush()
        kv = caches.bytes()
    return {
        "tokens": len(window.fed),
        "kv": kv,
        "cache_classes": {"before": before, "after": class_counts(caches)},
        "timing": {
            "prefill_tokens": len(window.prefill),
            "prefill_s": meter.seconds.get("prefill"),
            "compress_s": meter.seconds.get("compress") if arm.method.compresses else None,
            "fed_tokens": len(fed),
            "score_s": meter.seconds["score"],
        },
        "peak_bytes": meter.peak_bytes,
    }
