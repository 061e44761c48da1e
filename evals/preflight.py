"""What a job needs in memory at the very least, before anything is loaded. No MLX.

A lower bound: weights in the dtype of computing, the exact K and V of one window or batch (every
method starts from them), and the log-probabilities of what a window scores, in fp32 and as kept.
What does not even fit that would end as a killed process hours later; what fits may still not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

GIB = 2**30
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
KEPT_BYTES = 4 + 2
"""Of a log-probability: computed in fp32, kept in fp16 (evals/logprobs.py)."""


@dataclass(frozen=True)
class Needs:
    """Bytes of a job, by what they are for."""

    weights: int
    kv: int
    log_probs: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.weights + self.kv + self.log_probs


def needs(spec: Mapping[str, Any]) -> Needs:
    """Return what a job's spec (:class:`evals.job.Job`) asks for."""
    model, config = spec["model"], spec["config"]
    item = ITEM_BYTES[config["dtype"]]
    tokens, rows, scored = _lengths(config)
    width = model["head_dim_k"] + model["head_dim_v"]
    return Needs(
        weights=model["float_weights"] * item + model["packed_bytes"],
        kv=rows * tokens * model["n_layers"] * model["kv_heads"] * width * item,
        log_probs=scored * model["vocab_size"] * KEPT_BYTES,
    )


def _lengths(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return tokens of a row, rows held at once, and tokens whose log-probabilities are compared.

    Of a task's items only the tokenizer knows the length; what the config demands is counted.
    """
    settings, dataset = config["eval"], config["dataset"]
    if settings["task"] != "downstream":
        scored = settings.get("scored_tokens", 0)
        return settings.get("prefill_tokens", 0) + scored, 1, scored
    known = [dataset.get("min_context_tokens") or 0, *(dataset.get("lengths") or [])]
    return max(known), settings["batch_size"], 0


def refusal(spec: Mapping[str, Any]) -> str | None:
    """Return why a job cannot fit, with the numbers, or None.

    The limit is ``job.memory_limit_gib``, else the machine's memory where the accelerator shares
    it or there is none; a CUDA device's own is not known to a process without MLX.
    """
    gib, name = spec["memory_limit_gib"], "job.memory_limit_gib"
    if gib is None:
        if spec["config"]["backend"] == "cuda":
            return None
        gib, name = psutil.virtual_memory().total / GIB, "this machine's memory"
    found = needs(spec)
    if found.total <= gib * GIB:
        return None
    parts = " + ".join(
        f"{size / GIB:.3g} of {what}"
        for what, size in (
            ("weights", found.weights),
            ("exact K and V", found.kv),
            ("log-probabilities", found.log_probs),
        )
    )
    return (
        f"needs at least {found.total / GIB:.3g} GiB ({parts}), over {name}={gib:.3g} GiB."
        " Next step: a smaller or quantized model, shorter windows (eval.prefill_tokens,"
        " eval.scored_tokens), a smaller eval.batch_size, or more memory."
    )
