"""The tasks: what is measured on a model with a method's caches (``eval=``).

A task is ``samples`` and ``metrics`` (see :mod:`evals.tasks.base`). Importing this
package imports no MLX, so the parent process may check an ``eval`` config before starting a job.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evals.schema import EvalConfig

if TYPE_CHECKING:
    from evals.tasks.base import Task

TASKS = {
    "downstream": "evals.tasks.downstream:Downstream",
    "perplexity": "evals.tasks.perplexity:Perplexity",
    "reconstruction": "evals.tasks.reconstruction:Reconstruction",
}


class EvalError(ValueError):
    """An ``eval`` setting that cannot be used; the text names field, value and what is allowed."""


def check_settings(settings: EvalConfig) -> None:
    """Raise :class:`EvalError` for a combination that no task can run (ranges: evals/validate)."""
    if settings.task == "reconstruction" and settings.prefill != "exact":
        raise EvalError(
            f"eval.prefill={settings.prefill!r}: must be exact with eval=reconstruction, which "
            "compares with an exact prefill."
        )
    if settings.task == "downstream":
        return
    if settings.prefill_tokens < 1 and (
        settings.task == "reconstruction" or settings.protocol == "prefix"
    ):
        raise EvalError(
            f"eval.prefill_tokens={settings.prefill_tokens!r}: must be at least 1 with "
            f"eval={settings.name}, where only a prefill is compressed."
        )
    if settings.chunk is not None and settings.protocol != "decode":
        raise EvalError(
            f"eval.chunk={settings.chunk!r}: must be null with eval={settings.name}, which feeds "
            "its tokens in one call. Use eval=decode."
        )


def make_task(config: Mapping[str, Any]) -> Task:
    """Return the task of a job's config; :class:`EvalError` where it cannot be run."""
    settings = EvalConfig(**config["eval"])
    check_settings(settings)
    module, name = TASKS[settings.task].split(":")
    return getattr(importlib.import_module(module), name)()
