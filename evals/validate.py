"""Typed configs held against their meaning: ranges, named values, and sweeps that measure nothing.

Types are already right here (``evals.names``). What needs the model or the data (layer counts,
files, lengths) is checked where they are read. No MLX.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.types import Override

from evals import share
from evals.compose import Plan, make_method
from evals.names import ConfigError, check_name
from evals.schema import Config
from gear.methods import METHODS, load_method

CHOICES: dict[str, tuple[str, ...]] = {
    "model.source": ("smollm2", "tiny", "hub", "local"),
    "model.dtype": ("auto", "float32", "float16", "bfloat16"),
    "dataset.source": ("embedded", "hub", "file", "package", "generated"),
    "eval.task": ("perplexity", "reconstruction", "downstream"),
    "eval.protocol": ("decode", "prefix", "oneshot"),
    "eval.prefill": ("exact", "streaming"),
    "eval.attention": ("packed", "dense"),
    "device": ("auto", "cpu", "metal", "cuda"),
}
"""The allowed values of every setting that is a name."""

LOWEST: dict[str, float] = {
    "model.layers": 1,
    "model.heads": 1,
    "model.kv_heads": 1,
    "model.head_dim": 1,
    "model.vocab_size": 2,
    "model.seed": 0,
    "dataset.limit": 1,
    "dataset.windows_per_document": 1,
    "eval.prefill_tokens": 0,
    "eval.scored_tokens": 1,
    "eval.chunk": 1,
    "eval.prefill_chunk": 1,
    "eval.tile_tokens": 1,
    "eval.batch_size": 1,
    "eval.max_new_tokens": 1,
    "eval.bootstrap_samples": 1,
    "dataset.num_fewshot": 0,
    "dataset.per_cell": 1,
    "job.retries": 0,
    "seed": 0,
}
"""The smallest allowed value of every count; null passes where the schema allows it."""

NAMES = ("model.name", "dataset.name", "eval.name", "tracking.name", "tracking.experiment_name")
"""What stands in tables, pages and file names."""

ABOVE_ZERO = ("job.time_limit_s", "job.memory_limit_gib", "job.prefill_memory_gib")
_RANKS = ("gear.rank", "gear.k.rank", "gear.v.rank")


def _value(config: Config, name: str) -> Any:
    """Return the setting with a dotted name."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def check_config(config: Config) -> None:
    """Raise :class:`ConfigError` (SettingError for GEAR's): field, value and what is allowed."""
    for name, allowed in CHOICES.items():
        if (value := _value(config, name)) not in allowed:
            raise ConfigError(f"{name}={value!r}: must be one of {', '.join(allowed)}.")
    for name, lowest in LOWEST.items():
        value = _value(config, name)
        if value is not None and value < lowest:
            raise ConfigError(f"{name}={value!r}: must be at least {lowest:g}.")
    for name in NAMES:
        check_name(name, _value(config, name))
    check_name("cache.name", config.cache["name"])
    for name in ABOVE_ZERO:
        value = _value(config, name)
        if value is not None and not (0 < value < math.inf):
            raise ConfigError(f"{name}={value!r}: must be above 0, or null for no limit.")
    if (wrong := share.problem(config.job.share)) is not None:
        raise ConfigError(f"job.share: {wrong}.")
    if not 0 < config.eval.confidence < 1:
        raise ConfigError(f"eval.confidence={config.eval.confidence!r}: must be between 0 and 1.")
    if (config.eval.task == "downstream") != (config.dataset.task is not None):
        raise ConfigError(
            f"eval={config.eval.name}, dataset={config.dataset.name}: eval=downstream asks a task's"
            " items, and a task's dataset has no other eval. Leave eval= out, or use dataset="
            "gsm8k_cot, arc_easy, passkey, … (all: python run.py --help)."
        )
    _check_attend(config)
    # The model is not read yet: its upper bound on layer numbers is checked with it.
    make_method(config).plan(max([0, *config.gear.by_layer]) + 1)


def _check_attend(config: Config) -> None:
    """Refuse attend=compressed where the prefill never passes through the cache."""
    uses = make_method(config).uses_gear and config.gear.attend == "compressed"
    if uses and config.eval.protocol != "oneshot" and config.eval.prefill != "streaming":
        raise ConfigError(
            "gear.attend='compressed': needs eval.prefill=streaming (or eval=oneshot). With an"
            " exact prefill no pass sees its own tokens compressed; add eval.prefill=streaming."
        )


def check_plan(plan: Plan) -> list[str]:
    """Check every job and the sweep as a whole; return warnings to show. Raises as above."""
    for config in plan.configs:
        check_config(config)
    _check_rank_sweep(plan)
    methods = {config.cache["name"]: make_method(config) for config in plan.configs}
    unused = [o.input_line or o.key_or_group for o in plan.overrides if _is_gear(o)]
    if unused and not any(method.uses_gear for method in methods.values()):
        return [
            f"{', '.join(unused)}: not used by cache={', '.join(methods)}."
            f" GEAR's numbers change cache={', '.join(_gear_family())} only."
        ]
    return []


def _gear_family() -> list[str]:
    """Return the methods that take GEAR's numbers."""
    return [name for name, target in METHODS.items() if load_method(target).uses_gear]


def _is_gear(override: Override) -> bool:
    """Tell whether an override sets GEAR's numbers."""
    return override.key_or_group.split(".")[0] == "gear"


def _swept(overrides: Iterable[Override], names: Iterable[str]) -> str | None:
    """Return the first of ``names`` that a sweep varies."""
    varied = {o.key_or_group for o in overrides if o.is_sweep_override()}
    return next((name for name in names if name in varied), None)


def _check_rank_sweep(plan: Plan) -> None:
    """Refuse a sweep over the prefill rank in which no prefill block can form."""
    if not (name := _swept(plan.overrides, _RANKS)):
        return
    for config in plan.configs:
        n_b, tokens = make_method(config).block_tokens(), config.eval.prefill_tokens
        if n_b is not None and tokens <= n_b:
            raise ConfigError(
                f"eval.prefill_tokens={tokens}: a sweep over {name} needs more than n_b={n_b}."
                f" {name} is the rank of prefill blocks, and none forms;"
                " decode blocks take gear.rank_decode."
            )
