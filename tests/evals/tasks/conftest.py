"""A tiny random llama, a few documents, and contexts over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from evals import tiny
from evals.caches import make_caches
from evals.data import Document
from evals.logprobs import LogprobStore
from evals.prefill import PrefillStore
from evals.schema import EvalConfig
from evals.tasks.base import Context
from gear.config import GearConfig
from gear.methods import METHODS, load_method

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, it was the epoch of belief, it was the epoch of incredulity. "
)


class CountingModel:
    """A model that notes the lengths of its calls."""

    def __init__(self, model: Any) -> None:
        self.model, self.layers, self.calls = model, model.layers, []

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        self.calls.append(tokens.shape[1])
        return self.model(tokens, cache=cache)


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab_size": 257, "seed": 0}
    return tiny.build(sizes)


@pytest.fixture
def make_context(tiny_model: Any, tmp_path: Path) -> Callable[..., Context]:
    """Return a function from a method, GEAR's numbers and eval overrides to a Context."""
    prefills = PrefillStore()

    def make(method: str = "fp16", gear: dict[str, Any] | None = None, **settings: Any) -> Context:
        options = {
            "settings": GearConfig(
                **{"group_size": 32, "n_b": 32, "sparse_frac": 0.1, **(gear or {})}
            )
        }
        made = load_method(METHODS[method])
        built = made(**options) if made.uses_gear else made()
        exact = load_method(METHODS["fp16"])()
        model = CountingModel(tiny_model)
        base = {"prefill_tokens": 96, "scored_tokens": 64, "bootstrap_samples": 100}
        evaluation = EvalConfig(**{**base, "name": "decode", **settings})
        return Context(
            model=model,
            tokenizer=tiny.ByteTokenizer(),
            documents=[Document(f"doc{i}", TEXT[i:] + TEXT) for i in range(3)],
            config={
                "eval": asdict(evaluation),
                "dataset": {"windows_per_document": 1},
                "cache": {"name": method, "layers": built.plan(2)},
                "dtype": "float32",
                "seed": 0,
            },
            method=built,
            make_caches=partial(make_caches, model, built),
            exact_method=exact,
            make_exact_caches=partial(make_caches, model, exact),
            logprobs=LogprobStore(tmp_path, "baseline"),
            progress=lambda *_: None,
            prefills=prefills,
        )

    return make
