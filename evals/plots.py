"""Figures from records, by name: those of a sweep and those of one job.

Each is drawn by a function of its own (evals/figures_*.py) from records and, where it shows what
records do not hold, their samples. What the records give nothing for is not among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evals.drawing import Drawing, Samples, save
from evals.figures_bytes import bytes_by_term
from evals.figures_fidelity import kl_by_position
from evals.figures_layers import errors, layers
from evals.figures_quality import pareto
from evals.figures_retrieval import retrieval
from evals.figures_settings import rank, sparsity

__all__ = [
    "CAPTIONS", "Drawing", "Samples", "bytes_by_term", "errors", "kl_by_position", "layers",
    "of_job", "of_sweep", "pareto", "rank", "retrieval", "save", "sparsity",
]  # fmt: skip

Record = dict[str, Any]

CAPTIONS = {
    "pareto": "Quality against stored bytes. The line joins what no other method beats in both; "
    "hollow marks are beaten.",
    "rank": "Quality against the rank of the low-rank term, every other setting of a line fixed.",
    "sparsity": "Quality against the share of outliers, every other setting of a line fixed.",
    "bytes_by_term": "What the stored bytes are spent on, in percent of the fp16 cache.",
    "kl_by_position": "KL from fp16 by the place of the scored token, mean over windows; bands are "
    "intervals over documents.",
    "errors": "Relative error of K and V by layer and head, mean over windows.",
    "retrieval": "Accuracy by length of the prompt and depth of the answer.",
    "layers": "Stored bytes and mean relative errors by layer.",
}
"""What each figure shows, by name."""


def of_sweep(records: Sequence[Record], samples: Samples) -> dict[str, Drawing]:
    """Return the figures of a sweep by name; ``samples`` gives those of a record's key."""
    return _drawn({
        "pareto": pareto(records),
        "rank": rank(records),
        "sparsity": sparsity(records),
        "bytes_by_term": bytes_by_term(records),
        "kl_by_position": kl_by_position(records, samples),
        "errors": errors(records, samples),
        "retrieval": retrieval(records, samples),
    })  # fmt: skip


def of_job(record: Record, samples: Sequence[Record]) -> dict[str, Drawing]:
    """Return the figures of one record and its samples by name."""

    def own(_: str) -> Sequence[Record]:
        return samples

    return _drawn({
        "layers": layers(record, samples),
        "kl_by_position": kl_by_position([record], own),
        "errors": errors([record], own),
        "retrieval": retrieval([record], own),
    })  # fmt: skip


def _drawn(figures: Mapping[str, Drawing | None]) -> dict[str, Drawing]:
    """Leave out what had nothing to draw."""
    return {name: figure for name, figure in figures.items() if figure is not None}
