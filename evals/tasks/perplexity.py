"""Perplexity of the scored tokens (token, word, bits per byte) and fidelity against the fp16 arm.

ppl_token = exp(sum nll / tokens), ppl_word = exp(sum nll / words), bits_per_byte = sum nll /
(ln 2 · bytes), all over the same T scored tokens a window (see :mod:`evals.tasks.scoring`). The
protocol is in a quality metric's name, because numbers of different protocols do not compare.
Intervals resample documents. Rolling windows over whole documents are not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from evals.logprobs import Reference
from evals.schema import EvalConfig
from evals.statistics import ratio_interval
from evals.tasks.base import Context
from evals.tasks.costs import Sample, cost_metrics
from evals.tasks.fidelity import Comparison, Recorder, fidelity_metrics, floats
from evals.tasks.scoring import Arm, exact_arm, walk
from evals.windows import Window, spans


def protocol_name(settings: EvalConfig) -> str:
    """Return the protocol as quality metrics carry it: ``decode``, ``decode-chunk16``, ..."""
    name = settings.protocol
    if settings.chunk is not None:
        name += f"-chunk{settings.chunk}"
    if settings.prefill == "streaming" and settings.protocol != "oneshot":
        name += f"-streaming{settings.prefill_chunk}"
    return name


def _record(ctx: Context, window: Window, arm: Arm) -> tuple[Reference, Sample]:
    """Walk a window exactly; keep and return what it predicts, and the walk's cost."""
    recorder = Recorder(window.targets)
    cost = walk(ctx, window, arm, recorder, ctx.eval.protocol)
    reference = recorder.reference()
    ctx.logprobs.put(window.document, window.index, reference)
    return reference, cost


def _exact(ctx: Context, window: Window) -> Sample:
    """Return the scores and cost of a window in the fp16 arm."""
    reference, cost = _record(ctx, window, Arm(ctx.method, ctx.make_caches()))
    nll = floats(reference.nll)
    return {
        "nll": nll,
        "nll_fp16": nll,
        "kl": [0.0] * len(nll),
        "top1_flips": [0] * len(nll),
        **cost,
    }


def _compared(ctx: Context, window: Window) -> Sample:
    """Return the scores and cost of a window with the method under test."""
    reference = ctx.logprobs.get(window.document, window.index)
    if reference is None:
        reference, _ = _record(ctx, window, exact_arm(ctx))
    comparison = Comparison(window.targets, reference)
    arm = Arm(ctx.method, ctx.make_caches())
    cost = walk(ctx, window, arm, comparison, ctx.eval.protocol)
    return {
        "nll": comparison.nll,
        "nll_fp16": floats(reference.nll),
        "kl": comparison.kl,
        "top1_flips": comparison.flips,
        **cost,
    }


def _oneshot_nll(ctx: Context, window: Window) -> float:
    """Return the mean NLL of a window's scored tokens out of one exact pass over all of it."""
    recorder = Recorder(window.targets)
    walk(ctx, window, exact_arm(ctx), recorder, "oneshot")
    return mean(floats(recorder.reference().nll))


@dataclass(frozen=True)
class _Pool:
    """Ratios of sums over windows, with an interval that resamples documents."""

    documents: list[str]
    """The document of each window."""
    settings: EvalConfig
    seed: int

    def __call__(
        self,
        name: str,
        numerators: Sequence[float],
        denominators: Sequence[int],
        scale: Callable[[float], float] = float,
    ) -> dict[str, float]:
        """Return ``name`` and, where there is one, its interval; {} where nothing was counted."""
        sums: dict[str, list[float]] = {}
        for document, *pair in zip(self.documents, numerators, denominators, strict=True):
            sums[document] = [a + b for a, b in zip(sums.get(document, (0, 0)), pair, strict=True)]
        top, bottom = zip(*sums.values(), strict=True)
        if not sum(bottom):
            return {}
        metrics = {name: scale(sum(top) / sum(bottom))}
        interval = ratio_interval(
            top,
            bottom,
            resamples=self.settings.bootstrap_samples,
            confidence=self.settings.confidence,
            seed=self.seed,
        )
        if interval is not None:
            metrics[f"{name}_low"], metrics[f"{name}_high"] = map(scale, interval)
        return metrics


def _exp(nats: float) -> float:
    """Return e^nats, infinite (which the guard sees) instead of an OverflowError."""
    return math.exp(nats) if nats < 709 else math.inf


class Perplexity:
    """``eval=decode``, ``prefix`` and ``oneshot``."""

    def resumable(self, samples: Sequence[Sample], ctx: Context) -> Sequence[Sample]:
        """Return none: windows are few, and a killed run begins anew."""
        return ()

    def samples(self, ctx: Context) -> Iterator[Sample]:
        """Yield one sample a window: per scored token nll, nll_fp16, kl, top1_flips; and its cost.

        The fp16 arm's first sample also has ``oneshot_nll``, the mean NLL of the same tokens out of
        one pass, for the guard that calls and one pass agree.
        """
        score = _exact if ctx.is_exact else _compared
        walked = 0
        for done, window in enumerate(ctx.windows, start=1):
            n_words, n_bytes = spans(ctx.tokenizer, window)
            sample = {
                "document": window.document,
                "window": window.index,
                "n_words": n_words,
                "n_bytes": n_bytes,
                **score(ctx, window),
            }
            if done == 1 and ctx.is_exact and ctx.eval.protocol != "oneshot":
                sample["oneshot_nll"] = _oneshot_nll(ctx, window)
            walked += len(window.prefill) + len(window.fed)
            yield sample
            ctx.progress(done, len(ctx.windows), walked)

    def metrics(self, samples: Sequence[Sample], ctx: Context) -> dict[str, float]:
        """Return ``quality/*``, ``fidelity/*``, ``kv/*``, ``speed/*``, ``mem/*`` with intervals."""
        pool = _Pool([s["document"] for s in samples], ctx.eval, ctx.config["seed"])
        nll = [sum(s["nll"]) for s in samples]
        delta = [sum(s["nll"]) - sum(s["nll_fp16"]) for s in samples]
        kl = [sum(s["kl"]) for s in samples]
        tokens, words, n_bytes = ([s[n] for s in samples] for n in ("tokens", "n_words", "n_bytes"))
        name = protocol_name(ctx.eval)
        return {
            **pool(f"quality/ppl_token/{name}", nll, tokens, _exp),
            **pool(f"quality/ppl_word/{name}", nll, words, _exp),
            **pool(f"quality/bits_per_byte/{name}", [x / math.log(2) for x in nll], n_bytes),
            **pool("fidelity/kl_mean", kl, tokens),
            **pool("fidelity/delta_nll", delta, tokens),
            **fidelity_metrics(samples),
            **cost_metrics(samples),
        }
