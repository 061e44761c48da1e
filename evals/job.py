"""A job: one composed config, reduced to what can change its result, and that reduction's key.

``config`` is hashed and recorded: values only, each resolved (K and V settings per layer, content
and weight hashes, backend, dtype). ``spec`` is what the worker needs to compute it, and may hold
paths and limits. No MLX here, so that a sweep knows in milliseconds which of its jobs are done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from evals import blas, calibrated, models, retrieval
from evals.data import content_hash, load_documents
from evals.items import load_items
from evals.record import PROTOCOL_VERSION, plain, run_key
from evals.schema import Config, DatasetConfig, EvalConfig
from evals.settings import OF_DOWNSTREAM, OF_PACKED_ATTENTION, OF_TASKS, OF_WINDOWS
from evals.tasks import check_settings
from gear.config import GearConfig, LayerConfig, SettingError, SideConfig
from gear.methods import METHODS, Method, load_method

FP16 = {"name": "fp16", "_target_": METHODS["fp16"]}
"""The exact cache, which every other method is compared with."""


@dataclass(frozen=True)
class Job:
    """One unit of work; ``baseline`` is the fp16 arm to finish first, or None."""

    key: str
    config: dict[str, Any]
    spec: dict[str, Any]
    baseline: Job | None
    calibration: list[dict[str, str]] = field(default_factory=list)
    """What each calibration file of the cache says of itself; its content is in the key."""

    @property
    def title(self) -> str:
        """Return the options' names, as a person reads them."""
        return " · ".join(
            self.config[group]["name"] for group in ("cache", "model", "dataset", "eval")
        )


def build_job(cfg: Config, root: Path) -> Job:
    """Return the job of a composed config, its baseline included.

    ValueError (SettingError, ModelError, DataError, EvalError) says which field cannot be used;
    CalibrationMissing that a file is to be made first.
    """
    check_settings(cfg.eval)
    backend = _backend(cfg.device)
    model = models.describe(cfg.model, root)
    config = {
        "protocol": PROTOCOL_VERSION,
        "model": {"name": model.name, **model.config, "weight_hash": model.weight_hash},
        "dataset": _dataset(cfg),
        "seed": cfg.seed,
        "backend": backend,
        "dtype": models.compute_dtype(cfg.model, model, backend),
    }
    spec = {
        "root": str(root),
        "model": {**asdict(model), "path": model.path and str(model.path)},
        "dataset": asdict(cfg.dataset),
        **asdict(cfg.job),
    }
    text = config["dataset"]["content_hash"]
    use = calibrated.Use(model.name, model.weight_hash, text, cfg.dataset, cfg.seed)
    job = _arm(_resolved(cfg, model, config, use), cfg.eval, model, config, spec)
    job = replace(job, calibration=calibrated.check(job.spec["cache"], use))
    if not has_baseline(cfg):
        return job
    baseline = _arm(FP16, cfg.eval, model, config, spec)
    return replace(job, spec={**job.spec, "baseline_key": baseline.key}, baseline=baseline)


def _resolved(
    cfg: Config, model: models.ModelInfo, config: dict[str, Any], use: calibrated.Use
) -> dict[str, Any]:
    """Return the cache's options as plain values, the files of ``calibration: auto`` named."""
    cache = _plain_cache(cfg.cache)
    method = build_method(cache)
    try:
        return calibrated.resolve(cache, method, model.n_layers, use)
    except calibrated.CalibrationMissing as error:
        error.config = plain({**config, **_own(cache, cfg.eval, method, model)})
        raise


def _own(
    cache: Mapping[str, Any], settings: EvalConfig, method: Method, model: models.ModelInfo
) -> dict[str, Any]:
    """Return the part of the key that the arms of a job do not share."""
    layers = method.plan(model.n_layers)
    return {"eval": measured(settings, method), "cache": {"name": cache["name"], "layers": layers}}


def has_baseline(cfg: Config) -> bool:
    """Tell whether a job is compared with an fp16 arm."""
    return cfg.cache["name"] != "fp16" and cfg.eval.task != "reconstruction"


def _arm(
    cache: Mapping[str, Any],
    settings: EvalConfig,
    model: models.ModelInfo,
    config: dict[str, Any],
    spec: dict[str, Any],
) -> Job:
    """Return the job of one cache, without a baseline; it is refused where it does not fit."""
    method = build_method(cache)
    method.check_shape(model.n_layers, model.kv_heads, model.head_dim_k, model.head_dim_v)
    config = plain({**config, **_own(cache, settings, method, model)})
    key = run_key(config)
    identity = {"key": key, "baseline_key": key, "config": config, "cache": _plain_cache(cache)}
    return Job(key, config, plain({**spec, **identity}), baseline=None)


def _backend(device: str) -> str:
    """Return the backend that ``device`` means on this machine."""
    installed = blas.backend()
    if device not in ("auto", "cpu", installed):
        allowed = ", ".join(dict.fromkeys(["auto", "cpu", installed]))
        hint = "The MLX that is installed has no other backend."
        raise SettingError("device", device, f"one of {allowed}", hint)
    return installed if device == "auto" else device


def measured(settings: EvalConfig, method: Method) -> dict[str, Any]:
    """Return the settings of ``eval`` that task and method read: others are nothing to the key."""
    unused = OF_WINDOWS if settings.task == "downstream" else OF_DOWNSTREAM
    if not method.uses_gear:  # how GEAR attends is nothing to the others
        unused += tuple(name.removeprefix("eval.") for name in OF_PACKED_ATTENTION)
    return {name: value for name, value in asdict(settings).items() if name not in unused}


def _dataset(cfg: Config) -> dict[str, Any]:
    """Return the dataset's part of the key: its options and what it holds, but not where it is."""
    values = asdict(cfg.dataset)
    digest, n_documents = _contents(json.dumps(values), cfg.seed)
    unused = ("path", "fewshot_path") if cfg.dataset.task else ("path", "fewshot_path", *OF_TASKS)
    values = {name: value for name, value in values.items() if name not in unused}
    return {**values, "content_hash": digest, "n_documents": n_documents}


@lru_cache(maxsize=32)  # the jobs of a sweep share their texts; the worker verifies the hash
def _contents(dataset: str, seed: int) -> tuple[str, int]:
    """Return the hash and the number of what a dataset (as JSON) holds."""
    cfg = DatasetConfig(**json.loads(dataset))
    if cfg.source == "generated":
        total = retrieval.total(cfg)
        return retrieval.fingerprint(cfg), min(total, cfg.limit or total)
    if cfg.task is not None:
        items = load_items(cfg, seed)
        return items.content_hash, len(items.scored)
    documents = load_documents(cfg, seed)
    return content_hash(documents), len(documents)


def _plain_cache(cache: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cache's options as plain values, GEAR's numbers included."""
    settings = cache.get("settings")
    return (
        {**cache, "settings": asdict(settings)} if isinstance(settings, GearConfig) else {**cache}
    )


def build_method(cache: Mapping[str, Any]) -> Method:
    """Return the method of a ``conf/cache`` node: its dataclass with the node's options.

    ``settings`` may be a GearConfig or the plain values of one. ValueError for a ``_target_`` that
    is not in the table.
    """
    method = load_method(cache["_target_"])
    options = {name: value for name, value in cache.items() if name not in ("name", "_target_")}
    if isinstance(options.get("settings"), Mapping):
        options["settings"] = _gear_settings(options["settings"])
    return method(**options)


def _gear_settings(values: Mapping[str, Any]) -> GearConfig:
    """Return the settings of plain values as JSON gives them (layer numbers are text there)."""

    def side(layer: Mapping[str, Any], name: str) -> SideConfig:
        return SideConfig(**(layer.get(name) or {}))

    layers = values.get("by_layer") or {}
    by_layer = {int(i): LayerConfig(k=side(c, "k"), v=side(c, "v")) for i, c in layers.items()}
    nested = {"k": side(values, "k"), "v": side(values, "v"), "by_layer": by_layer}
    return GearConfig(**{**values, **nested})
