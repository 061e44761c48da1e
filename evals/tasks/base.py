"""What every task has in common: its protocol and the context it runs in.

Tasks see models, documents and caches, never Hydra, MLflow or a file of the results root.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from evals.caches import Caches
from evals.data import Document
from evals.items import Items
from evals.logprobs import LogprobStore
from evals.prefill import PrefillStore
from evals.questions import Questions
from evals.schema import EvalConfig
from evals.tasks.costs import Sample
from evals.windows import Window, windows_of
from gear.methods import Method

_log = logging.getLogger(__name__)


@dataclass
class Context:
    """All that a job's task runs with. ``prefills`` outlives the job: pass one per model."""

    model: Any
    """mlx-lm model: ``model(tokens [1, n], cache=layers) -> logits [1, n, vocabulary]``."""
    tokenizer: Any
    documents: Sequence[Document]
    config: Mapping[str, Any]
    """The job's hashed config (see ``evals/job.py``)."""
    method: Method
    """The method under test."""
    make_caches: Callable[[], Caches]
    """Fresh caches of ``method`` for one generation."""
    exact_method: Method
    """The fp16 arm's method."""
    make_exact_caches: Callable[[], Caches]
    """Fresh caches of the fp16 arm."""
    logprobs: LogprobStore
    """The fp16 arm's log-probabilities."""
    progress: Callable[[int, int, int], None]
    """Called after each window with windows done, windows in all, tokens walked so far."""
    prefills: PrefillStore = field(default_factory=PrefillStore)

    @cached_property
    def eval(self) -> EvalConfig:
        """The typed ``eval`` part of the config."""
        return EvalConfig(**self.config["eval"])

    @property
    def is_exact(self) -> bool:
        """Whether this job is the fp16 arm itself."""
        return not self.method.compresses

    @cached_property
    def windows(self) -> list[Window]:
        """Every window of the run, in document order; a document too short for one is logged.

        Raises ``DataError`` where no document holds a window.
        """
        windows, short = windows_of(
            self.documents,
            self.tokenizer,
            self.eval.prefill_tokens,
            self.eval.scored_tokens,
            self.config["dataset"]["windows_per_document"],
        )
        if short:
            _log.warning("shorter than one window and left out: %s", ", ".join(short))
        return windows


@dataclass
class TaskContext(Context):
    """What a downstream task runs with beside the rest; its ``documents`` are its items."""

    items: Items = field(kw_only=True)
    questions: Questions = field(kw_only=True)
    reference: Sequence[Sample] = field(kw_only=True)
    """The fp16 arm's samples; none in the fp16 arm."""
    resumed: Sequence[Sample] = ()
    """The samples that a killed run left and that stand."""


class Task(Protocol):
    """One thing to measure. A run is ``metrics(list(samples(ctx)), ctx)``."""

    def resumable(self, samples: Sequence[Sample], ctx: Context) -> Sequence[Sample]:
        """Return the first of a killed run's ``samples`` that need not be computed again."""
        ...

    def samples(self, ctx: Context) -> Iterator[Sample]:
        """Yield one plain dict a window, as it is written to samples.jsonl."""
        ...

    def metrics(self, samples: Sequence[Sample], ctx: Context) -> dict[str, float]:
        """Return the run's metrics from its samples and the config alone."""
        ...
