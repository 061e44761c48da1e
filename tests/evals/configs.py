"""A small job for the harness's tests: the tiny model, two documents, short windows."""

from __future__ import annotations

from typing import Any

from evals.schema import Config, DatasetConfig, EvalConfig, ModelConfig, TrackingConfig
from gear.config import GearConfig
from gear.methods import METHODS


def small(cache: str = "gear", method: str | None = None, **gear: Any) -> Config:
    """Return the job of a cache named ``cache``; ``method`` (default: the same) is what it runs."""
    target = METHODS[method or cache]
    settings = {"settings": GearConfig(**gear)} if "fp16" not in target else {}
    return Config(
        model=ModelConfig(name="tiny", source="tiny"),
        dataset=DatasetConfig(name="embedded", source="embedded", limit=2),
        cache={"name": cache, "_target_": target, **settings},
        eval=EvalConfig(name="decode", prefill_tokens=128, scored_tokens=64, bootstrap_samples=50),
        tracking=TrackingConfig(name="none", enabled=False),
    )
