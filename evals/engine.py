"""A model behind a method's caches: how a context enters them, and what continuations are worth.

Every scored token sees the compressed cache: a context *without its last token* is prefilled and
compressed at once, and its last token is fed in front of what is scored, in calls that end at block
boundaries (evals/tasks/scoring.py). Generation is evals/generation.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from evals.caches import Caches
from evals.tasks.costs import Meter, class_counts
from evals.tasks.scoring import Arm, Prefiller, feed, log_total, schedule
from gear.methods import Method

Cost = dict[str, Any]
"""What `evals.tasks.scoring.walk` returns, with ``context_tokens`` and ``context_compressed``."""


@dataclass(frozen=True)
class Scored:
    """A continuation's log-likelihood in nats, and whether greedy decoding would say it."""

    loglikelihood: float
    is_greedy: bool


@dataclass
class Start:
    """A context whose tokens but the last are in fresh caches, compressed."""

    context: list[int]
    caches: Caches
    meter: Meter
    classes: dict[str, int]
    """Layers by their cache's class, as they were made."""
    compressed: int
    """Tokens compressed in the layer that has least of them."""


@dataclass(frozen=True)
class Engine:
    """A model, the fresh caches of one method, and how contexts enter them."""

    model: Any
    make_caches: Callable[[], Caches]
    method: Method
    prefiller: Prefiller

    def start(self, context: list[int], shared: int = 0) -> Start:
        """Prefill and compress all tokens of ``context`` but the last, which is not fed."""
        caches, meter = self.make_caches(), Meter()
        classes = class_counts(caches)
        self.prefiller.fill(context[:-1], caches, meter, min(shared, len(context) - 1))
        return Start(context, caches, meter, classes, caches.bytes()["tokens_compressed_min"])

    def cost(
        self, start: Start, kv: dict[str, Any], classes: dict[str, int], scored: int, fed: int,
        score_s: float,
    ) -> Cost:  # fmt: skip
        """Return what it cost to score ``scored`` tokens behind a context, ``fed`` being fed."""
        seconds = start.meter.seconds
        return {
            "tokens": scored,
            "context_tokens": len(start.context),
            "context_compressed": start.compressed,
            "kv": kv,
            "cache_classes": {"before": start.classes, "after": classes},
            "timing": {
                "prefill_tokens": len(start.context) - 1,
                "prefill_s": seconds.get("prefill"),
                "compress_s": seconds.get("compress") if self.method.compresses else None,
                "fed_tokens": fed,
                "score_s": score_s,
            },
            "peak_bytes": start.meter.peak_bytes,
        }

    def score(
        self, context: list[int], continuations: Sequence[list[int]], shared: int = 0
    ) -> tuple[list[Scored], Cost]:
        """Return what each continuation, of one token or more, is worth behind ``context``.

        The context is compressed once; continuations that differ in their last token only are one
        feed (so all choices of one token are), the others go on from copies. ``kv`` of the cost is
        that after the first feed and a flush.
        """
        start = self.start(context, shared)
        feeds: dict[tuple[int, ...], list[int]] = {}
        for i, continuation in enumerate(continuations):
            feeds.setdefault((context[-1], *continuation[:-1]), []).append(i)
        found: dict[int, Scored] = {}
        kv: dict[str, Any] = {}
        classes = start.classes
        for number, (fed, members) in enumerate(feeds.items(), 1):
            caches = start.caches if number == len(feeds) else copy.deepcopy(start.caches)
            lengths = schedule(Arm(self.method, caches), None, len(fed))
            calls = feed(self.model, list(fed), lengths, caches, start.meter)
            found |= zip(members, _scored([continuations[i] for i in members], calls), strict=True)
            if (now := class_counts(caches)) != start.classes:
                classes = now
            if not kv:
                caches.flush()
                kv = caches.bytes()
        scored, fed_tokens = sum(map(len, continuations)), sum(map(len, feeds))
        seconds = start.meter.seconds["score"]
        cost = self.cost(start, kv, classes, scored, fed_tokens, seconds)
        return [found[i] for i in range(len(continuations))], cost


def log_probs(logits: mx.array, tokens: mx.array) -> mx.array:
    """Return the fp32 log-probabilities of ``tokens`` [n, m] by ``logits`` [n, vocabulary]."""
    logits = logits.astype(mx.float32)
    return mx.take_along_axis(logits, tokens, axis=-1) - log_total(logits)


def _scored(continuations: list[list[int]], calls: Iterable[mx.array]) -> list[Scored]:
    """Score continuations that differ in their last token only, from the logits of their feed."""
    targets = mx.array(continuations).T  # [tokens, continuations]
    totals, greedy, start = [0.0] * len(continuations), [True] * len(continuations), 0
    for logits in calls:
        now = targets[start : start + len(logits)]
        start += len(logits)
        picked: Any = log_probs(logits, now).sum(axis=0).tolist()
        best: Any = (mx.argmax(logits, axis=-1, keepdims=True) == now).all(axis=0).tolist()
        totals = [a + b for a, b in zip(totals, picked, strict=True)]
        greedy = [a and b for a, b in zip(greedy, best, strict=True)]
    return [Scored(total, is_greedy) for total, is_greedy in zip(totals, greedy, strict=True)]
