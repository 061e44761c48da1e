"""Guards: what must hold for a run's numbers to mean what they say. One failed guard fails the run.

Each check reads the run's config, samples and metrics, never the caches. The guards on compression
and on KL do not apply to ``cache=fp16`` nor to ``eval=oneshot`` where attention is exact: one pass
cannot see a cache that is exact for its own tokens; nor to an eviction whose budget takes every
prompt whole. No MLX here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PASSED, NOT_APPLICABLE = "passed", "not_applicable"
LEAST_COMPRESSED = 0.5
"""Share of a downstream task's context tokens, over all items."""


@dataclass(frozen=True)
class _Run:
    config: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, float]
    coverage: Mapping[str, int]

    @property
    def is_exact(self) -> bool:
        """Whether this is the fp16 arm."""
        return self.config["cache"]["name"] == "fp16"

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The method's resolved settings per layer."""
        return self.config["cache"].get("layers", [])

    @property
    def task(self) -> str:
        """What was measured: perplexity, reconstruction or downstream."""
        return self.config["eval"]["task"]

    @property
    def sees_no_cache(self) -> bool:
        """Whether one pass over everything attends to exact K and V only."""
        one_pass = self.task == "perplexity" and self.config["eval"]["protocol"] == "oneshot"
        return one_pass and any(layer.get("attend") == "exact" for layer in self.layers)

    @property
    def evicts_nothing(self) -> bool:
        """Whether an evicting method's budget is no less than the longest prompt."""
        first = self.layers[0] if self.layers else {}
        if "budget" not in first:
            return False
        if first["budget_fraction"] is not None:
            return first["budget_fraction"] == 1
        return all(s["timing"]["prefill_tokens"] <= first["budget"] for s in self.samples)

    @property
    def equals_fp16(self) -> bool:
        """Whether the run is fp16's by its settings, so that nothing can differ from it."""
        return self.is_exact or self.sees_no_cache or self.evicts_nothing

    @property
    def may_be_uncompressed(self) -> bool:
        """Whether the user asked for a run that compresses too little to mean anything."""
        return self.config["eval"]["allow_uncompressed"]


def _tokens_compressed(run: _Run) -> str:
    """Require compressed tokens in every covered layer at the end of every window.

    A downstream item may be too short for a block: there `_context_compressed` looks at all.
    """
    if run.equals_fp16:
        return NOT_APPLICABLE
    if run.coverage["covered_layers"] == 0:
        return "failed: no layer of this model has a cache that the method can compress"
    counts = [sample["kv"]["tokens_compressed_min"] for sample in run.samples]
    if (max(counts) if run.task == "downstream" else min(counts)) > 0:
        return PASSED
    if run.may_be_uncompressed:
        return NOT_APPLICABLE
    return (
        "failed: a layer ended a window with 0 tokens compressed; raise eval.prefill_tokens or "
        "eval.scored_tokens above n_b, or set eval.allow_uncompressed=true"
    )


def _context_compressed(run: _Run) -> str:
    """Require that at least half of what a downstream task's contexts hold was compressed."""
    if run.task != "downstream" or run.is_exact:
        return NOT_APPLICABLE
    share = run.metrics["coverage/context_compressed"]
    if share >= LEAST_COMPRESSED:
        return PASSED
    if run.may_be_uncompressed:
        return NOT_APPLICABLE
    return (
        f"failed: {share:.0%} of the context tokens were compressed, below {LEAST_COMPRESSED:.0%}:"
        " the scores are mostly the exact cache's. Ask with more examples (dataset.num_fewshot), or"
        " set eval.allow_uncompressed=true, which marks the table"
    )


def _cache_class(run: _Run) -> str:
    """Require the caches' classes at the end to be those that were made."""
    for sample in run.samples:
        before, after = sample["cache_classes"]["before"], sample["cache_classes"]["after"]
        if before != after:
            where = f"{sample['document']} window {sample['window']}"
            return f"failed: the caches of {where} were {before} and ended as {after}"
    return PASSED


def _below_fp16(run: _Run) -> str:
    """Require fewer stored bytes than fp16 would take, unless the settings allow more."""
    if run.equals_fp16:
        return NOT_APPLICABLE
    if run.may_be_uncompressed or any(s.get("allow_larger_than_fp16") for s in run.layers):
        return NOT_APPLICABLE
    stored, fp16 = run.metrics["kv/stored_bytes"], run.metrics["kv/fp16_bytes"]
    if stored < fp16:
        return PASSED
    return (
        f"failed: {stored:.0f} bytes stored where fp16 takes {fp16:.0f}; raise "
        "eval.prefill_tokens, or set gear.allow_larger_than_fp16=true"
    )


def _differs_from_fp16(run: _Run) -> str:
    """Refuse KL and flips, or differences from fp16, of exactly 0: no cache was seen."""
    if run.equals_fp16 or run.task == "reconstruction":
        return NOT_APPLICABLE
    if run.task == "downstream":
        # without it no generation was fp16's, and so none could be compared
        if run.metrics.get("fidelity/loglikelihood_diff_max", 1.0) > 0:
            return PASSED
        return "failed: every log-likelihood equals fp16's, so no token saw the compressed cache"
    if run.metrics["fidelity/kl_max"] == 0 and run.metrics["fidelity/top1_flip_rate"] == 0:
        return "failed: KL and flips are exactly 0, so no scored token saw the compressed cache"
    return PASSED


def _calls_match_oneshot(run: _Run) -> str:
    """Require the fp16 arm's perplexity in calls to equal one pass, on the first window."""
    first = run.samples[0]
    if "oneshot_nll" not in first:
        return NOT_APPLICABLE
    # the ratio of two perplexities is e^(difference of mean NLL)
    error = abs(math.expm1(sum(first["nll"]) / len(first["nll"]) - first["oneshot_nll"]))
    bound = 1e-3 if run.config["dtype"] == "float32" else 1e-2
    if error <= bound:
        return PASSED
    return (
        f"failed: fp16 perplexity in calls is {error:.2g} (relative) from one pass, more than "
        f"{bound:g}; this model's cache or mask does not continue a sequence correctly"
    )


def _finite(run: _Run) -> str:
    """Require every metric to be a finite number."""
    bad = [name for name, value in run.metrics.items() if not math.isfinite(value)]
    return f"failed: not finite: {', '.join(bad)}" if bad else PASSED


_GUARDS: dict[str, Callable[[_Run], str]] = {
    "tokens_compressed": _tokens_compressed,
    "context_compressed": _context_compressed,
    "cache_class": _cache_class,
    "below_fp16": _below_fp16,
    "differs_from_fp16": _differs_from_fp16,
    "calls_match_oneshot": _calls_match_oneshot,
    "finite": _finite,
}


def check(
    config: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, float],
    coverage: Mapping[str, int],
) -> dict[str, str]:
    """Return each guard's outcome by name: ``passed``, ``not_applicable`` or ``failed: why``.

    ``config`` is the job's hashed config, ``coverage`` that of its caches (``covered_layers``).
    """
    run = _Run(config, samples, metrics, coverage)
    return {name: guard(run) for name, guard in _GUARDS.items()}


def failures(guards: Mapping[str, str]) -> list[str]:
    """Return ``name: why`` of each guard that failed."""
    return [f"{name}: {why}" for name, why in guards.items() if why.startswith("failed")]
