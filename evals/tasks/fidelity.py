"""Fidelity: how far a method's predictions are from the fp16 arm's on the same tokens.

For each scored token, over the full vocabulary, in nats: KL(fp16 || method) = sum p (ln p - ln q);
the top-1 flip; and the paired difference of the target's NLL. p is the stored fp16 form of the
reference, renormalised in fp32. A token whose log-probabilities round to exactly the stored ones
has KL 0 by definition, so that a cache which silently does nothing is seen as exactly that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import numpy as np

from evals.logprobs import Reference
from evals.tasks.costs import Sample


def floats(array: mx.array) -> list[float]:
    """Return a vector's values, for JSON."""
    return cast("list[float]", array.tolist())


def target_nll(log_probs: mx.array, targets: mx.array) -> mx.array:
    """Return [tokens] negative log-likelihoods of ``targets`` under [tokens, vocabulary]."""
    return -mx.take_along_axis(log_probs, targets[:, None], axis=-1)[:, 0]


def kl_divergence(reference: mx.array, log_probs: mx.array) -> mx.array:
    """Return [tokens] KL in nats of fp16 ``reference`` from fp32 ``log_probs`` (same shape)."""
    exact = reference.astype(mx.float32)
    exact = exact - mx.logsumexp(exact, axis=-1, keepdims=True)
    p = mx.exp(exact)
    kl = mx.where(p > 0, p * (exact - log_probs), 0.0).sum(axis=-1)
    same = (log_probs.astype(mx.float16) == reference).all(axis=-1)
    return mx.where(same, 0.0, mx.maximum(kl, 0.0))


class Recorder:
    """Reads the fp16 arm: keeps what others are compared with."""

    def __init__(self, targets: list[int]) -> None:
        self.targets = mx.array(targets)
        self.parts: list[tuple[mx.array, mx.array, mx.array]] = []
        self.read = 0

    def __call__(self, log_probs: mx.array) -> None:
        """Take the next scored tokens' fp32 log-probabilities [tokens, vocabulary]."""
        targets = self.targets[self.read : self.read + log_probs.shape[0]]
        self.read += log_probs.shape[0]
        part = (
            log_probs.astype(mx.float16),
            target_nll(log_probs, targets),
            log_probs.argmax(axis=-1).astype(mx.int32),
        )
        mx.eval(part)
        self.parts.append(part)

    def reference(self) -> Reference:
        """Return all that was read."""
        return Reference(
            *(mx.concatenate(list(arrays)) for arrays in zip(*self.parts, strict=True))
        )


class Comparison:
    """Reads a method's walk: per scored token its NLL and its distance from the reference."""

    def __init__(self, targets: list[int], reference: Reference) -> None:
        self.targets = mx.array(targets)
        self.reference = reference
        self.nll: list[float] = []
        self.kl: list[float] = []
        self.flips: list[int] = []

    def __call__(self, log_probs: mx.array) -> None:
        """Take the next scored tokens' fp32 log-probabilities [tokens, vocabulary]."""
        part = slice(len(self.nll), len(self.nll) + log_probs.shape[0])
        nll = target_nll(log_probs, self.targets[part])
        kl = kl_divergence(self.reference.log_probs[part], log_probs)
        flips = log_probs.argmax(axis=-1) != self.reference.top1[part]
        mx.eval(nll, kl, flips)
        self.nll += floats(nll)
        self.kl += floats(kl)
        self.flips += [int(flip) for flip in floats(flips)]


def fidelity_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the ``fidelity/*`` over all scored tokens that have no interval."""
    kl = np.concatenate([sample["kl"] for sample in samples])
    flips = np.concatenate([sample["top1_flips"] for sample in samples])
    return {
        "fidelity/kl_p99": float(np.percentile(kl, 99)),
        "fidelity/kl_max": float(kl.max()),
        "fidelity/top1_flip_rate": float(flips.mean()),
    }
