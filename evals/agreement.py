"""A run's samples against the fp16 run's on the same items: what compression changed.

Both runs answered the same items, so everything here is paired: the change of the score with its
interval, the flips both ways with McNemar's exact test, and how far the generations and
log-likelihoods themselves agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evals.accuracy import detectable, first_divergence, mcnemar, paired_interval, wilson
from evals.statistics import ratio_interval

Sample = Mapping[str, Any]
Pairs = list[tuple[Sample, Sample]]


def paired_metrics(
    samples: Sequence[Sample],
    reference: Sequence[Sample],
    scores: str,
    confidence: float,
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, float]:
    """Return ``fidelity/*`` of ``samples`` against fp16's, matched by ``id``.

    ``scores`` names the headline metric in each sample's ``scores``. What is returned:

    - ``delta_acc`` with ``_low`` and ``_high``: change of the metric's mean. Right and wrong
      answers (0 and 1) get Newcombe's paired interval (evals/accuracy.py), other numbers a
      bootstrap over items (``resamples``, ``seed``); lists of numbers have none of the three.
    - for right and wrong answers ``flips_lost``, ``flips_gained`` (items), ``mcnemar_p`` and
      ``detectable_acc``, the smallest change that so many items could show (absent where none).
    - for generations (``text``) ``agreement``, the share that is equal token by token (as text
      where ``token_ids`` are missing), with Wilson's ``_low`` and ``_high``, and
      ``first_divergence_mean`` (tokens, over those that differ; absent where none does).
    - for ``loglikelihoods`` ``loglikelihood_diff_max`` and ``_mean`` (nats, absolute, over all
      choices); those of generations count where the generations are equal.

    Raises:
        ValueError: an id is there twice or on one side only, there are no samples, none has the
            metric, or one item has other numbers of log-likelihoods.
    """
    pairs = _matched(samples, reference)
    found = {
        **_score_metrics(_values(pairs, scores), confidence, resamples, seed),
        **_generation_metrics(pairs, confidence),
        **_loglikelihood_metrics(pairs),
    }
    return {f"fidelity/{name}": value for name, value in found.items()}


def _by_id(samples: Sequence[Sample], whose: str) -> dict[str, Sample]:
    """Return samples by id."""
    found = {sample["id"]: sample for sample in samples}
    if len(found) < len(samples):
        ids = [sample["id"] for sample in samples]
        twice = next(i for i in found if ids.count(i) > 1)
        raise ValueError(
            f"{whose} has item {twice!r} twice; expected each id once. "
            "Next step: delete its samples.jsonl and run the job again."
        )
    return found


def _matched(samples: Sequence[Sample], reference: Sequence[Sample]) -> Pairs:
    """Return (sample, fp16's sample) of every item, in the samples' order."""
    ours, theirs = _by_id(samples, "the run"), _by_id(reference, "the fp16 run")
    for lacks, missing in (
        ("the fp16 run", [i for i in ours if i not in theirs]),
        ("the run", [i for i in theirs if i not in ours]),
    ):
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ValueError(
                f"{lacks} has no answer to {len(missing)} items ({shown}); expected the same items "
                "in both. Next step: run both with the same dataset settings and seed."
            )
    if not ours:
        raise ValueError("no samples to compare. Next step: run at least one item.")
    return [(sample, theirs[i]) for i, sample in ours.items()]


def _values(pairs: Pairs, scores: str) -> list[tuple[Any, Any]]:
    """Return the headline metric of every item that has it, here and in fp16."""
    found = [
        (ours["scores"][scores], theirs["scores"][scores])
        for ours, theirs in pairs
        if scores in ours["scores"] and scores in theirs["scores"]
    ]
    if not found:
        known = sorted({name for ours, _ in pairs for name in ours["scores"]})
        raise ValueError(
            f"no sample has the metric {scores!r}; they have {', '.join(known) or 'none'}. "
            "Next step: set dataset.metric to one of these."
        )
    return found


def _score_metrics(
    values: list[tuple[Any, Any]], confidence: float, resamples: int, seed: int
) -> dict[str, float]:
    """Return the change of the score, and the flips where it is right or wrong."""
    if not all(isinstance(value, int | float) for pair in values for value in pair):
        return {}
    changes = [float(ours - theirs) for ours, theirs in values]
    found = {"delta_acc": math.fsum(changes) / len(changes)}
    if not {value for pair in values for value in pair} <= {0, 1}:
        interval = ratio_interval(
            changes, [1.0] * len(changes), resamples=resamples, confidence=confidence, seed=seed
        )
    else:
        both, neither = values.count((1, 1)), values.count((0, 0))
        lost, gained = values.count((0, 1)), values.count((1, 0))
        interval = paired_interval(both, lost, gained, neither, confidence)
        found |= {"flips_lost": lost, "flips_gained": gained, "mcnemar_p": mcnemar(lost, gained)}
        if (least := detectable(len(values), confidence)) < math.inf:
            found["detectable_acc"] = least
    if interval is not None:
        found["delta_acc_low"], found["delta_acc_high"] = interval
    return found


def _divergence(ours: Sample, theirs: Sample) -> tuple[bool, int | None]:
    """Return whether two generations are equal, and else the first token that differs if known."""
    if "token_ids" in ours and "token_ids" in theirs:
        at = first_divergence(ours["token_ids"], theirs["token_ids"])
        return at is None, at
    return ours["text"] == theirs["text"], None


def _generation_metrics(pairs: Pairs, confidence: float) -> dict[str, float]:
    """Return how many generations are equal, and where the others part."""
    found = [_divergence(o, t) for o, t in pairs if "text" in o and "text" in t]
    if not found:
        return {}
    equal = sum(same for same, _ in found)
    low, high = wilson(equal, len(found), confidence)
    metrics = {
        "agreement": equal / len(found),
        "agreement_low": low,
        "agreement_high": high,
    }
    places = [at for _, at in found if at is not None]
    if places:
        metrics["first_divergence_mean"] = sum(places) / len(places)
    return metrics


def _loglikelihood_metrics(pairs: Pairs) -> dict[str, float]:
    """Return how far log-likelihoods of the same tokens are apart."""
    apart: list[float] = []
    for ours, theirs in pairs:
        if "text" in ours and "text" in theirs and not _divergence(ours, theirs)[0]:
            continue
        here, there = (_loglikelihoods(sample) for sample in (ours, theirs))
        if len(here) != len(there):
            raise ValueError(
                f"item {ours['id']!r} has {len(here)} log-likelihoods and {len(there)} in the fp16 "
                "run; expected as many. Next step: run both again with the same task."
            )
        apart += [abs(a - b) for a, b in zip(here, there, strict=True)]
    if not apart:
        return {}
    return {
        "loglikelihood_diff_max": max(apart),
        "loglikelihood_diff_mean": math.fsum(apart) / len(apart),
    }


def _loglikelihoods(sample: Sample) -> Sequence[float]:
    """Return a sample's log-likelihoods, none where it has none."""
    if "loglikelihood" in sample:
        return [sample["loglikelihood"]]
    return sample.get("loglikelihoods") or []
