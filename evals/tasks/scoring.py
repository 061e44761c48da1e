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
from typing import Any

import mlx.core as mx

from evals.caches import Caches
from evals.prefill import PrefillStore, evaluate, hand_over
from evals.tasks.base import Context
from evals.tasks.costs import Meter, Sample, class_counts
from evals.windows import Window
from gear.methods import Method
from gear.methods.family import GearFamily

DEFAULT_CHUNK = 64
_SUMMED = 256  # entries that are added up first
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


def schedule(arm: Arm, chunk: int | None, total: int) -> list[int]:
    """Return the lengths of decode's calls, from what the caches hold after the prefill."""
    n_b = arm.method.block_tokens()
    if chunk is not None or n_b is None or not arm.caches.covered:
        length = chunk or DEFAULT_CHUNK
        return call_lengths(total, length, length)
    cache = arm.caches.layers[arm.caches.covered[0]]
    sinks = arm.method.settings.n_sink if isinstance(arm.method, GearFamily) else 0
    room = max(0, sinks - cache.offset) + n_b + arm.method.recent_tokens() - cache.buffered_tokens
    # a cache that compresses nothing has no room left; the guards are to say that
    return call_lengths(total, n_b, room if room > 0 else n_b)


@dataclass(frozen=True)
class Prefiller:
    """How prompts enter fresh caches: ``how`` is exact or streaming, in calls of ``chunk``."""

    model: Any
    prefills: PrefillStore
    how: str
    chunk: int

    def fill(self, tokens: list[int], caches: Caches, meter: Meter, shared: int = 0) -> None:
        """Bring ``tokens`` into the caches, compressed; the phases are prefill and compress.

        The first ``shared`` tokens are one prefill of all prompts that begin with them; a
        streaming prefill goes through the cache itself, and is not shared.
        """
        if not tokens:
            return
        if self.how == "exact":
            with meter.phase("prefill"):
                state, reused = self.prefills.prefill(
                    self.model, tokens, self.chunk, shared, caches.query_window
                )
            if reused:
                meter.base_bytes -= state.nbytes
            if reused or state.given:
                del meter.seconds["prefill"]
            with meter.phase("compress"):
                hand_over(state, caches)
            return
        with meter.phase("prefill"):
            for start in range(0, len(tokens), self.chunk):
                part = mx.array(tokens[start : start + self.chunk])
                self.model(part[None], cache=caches.layers)
                evaluate(caches.layers)
            caches.flush()
            evaluate(caches.layers)


def feed(
    model: Any, fed: list[int], lengths: list[int], caches: Caches, meter: Meter
) -> Iterator[mx.array]:
    """Feed tokens in calls of the given lengths; yield each call's logits [length, vocabulary]."""
    start = 0
    for length in lengths:
        tokens = mx.array(fed[start : start + length])
        start += length
        with meter.phase("score"):
            logits = model(tokens[None], cache=caches.layers)[0]
            mx.eval(logits)
        yield logits


def log_total(logits: mx.array) -> mx.array:
    """Return the log of the sum of exp(logits) [n, 1] of fp32 ``logits`` [n, vocabulary].

    On a CPU MLX adds one number after the other: the sum over a vocabulary of 50,000 would be
    1e-4 too small, always. So it is taken in two steps.
    """
    peak = logits.max(axis=-1, keepdims=True)
    shares = mx.pad(mx.exp(logits - peak), [(0, 0), (0, -logits.shape[-1] % _SUMMED)])
    return peak + mx.log(shares.reshape(len(logits), -1, _SUMMED).sum(-1).sum(-1, keepdims=True))


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
        how = ctx.eval.prefill, ctx.eval.prefill_chunk
        Prefiller(ctx.model, ctx.prefills, *how).fill(window.prefill, caches, meter)
    if protocol == "prefix":
        kv = caches.bytes()
    elif protocol == "decode":
        lengths = schedule(arm, ctx.eval.chunk, len(fed))
    for logits in feed(ctx.model, fed, lengths, caches, meter):
        # one-shot logits hold the prefill's too; elsewhere a call is never longer than T
        scored = logits[-len(window.fed) :].astype(mx.float32)
        read(scored - log_total(scored))
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
