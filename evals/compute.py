"""Compute one job in the worker: model, documents, fresh caches, task, samples, metrics, guards.

All of it comes from the job's ``spec`` (see :mod:`evals.job`), and the result is the body of the
job's record: status, metrics, guards, coverage, bytes and, of a failed one, the error. The parent
commits it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from evals import guards, models
from evals.asked import asked
from evals.caches import make_caches
from evals.data import DataError, Document, content_hash, load_documents
from evals.data_files import check_unchanged
from evals.job import FP16, build_method
from evals.logprobs import LogprobStore
from evals.prefill import PrefillStore
from evals.record import FINISHED, SAMPLES, SampleWriter, failure, load, read_samples, record_dir
from evals.schema import DatasetConfig, EvalConfig
from evals.tasks import make_task
from evals.tasks.base import Context, TaskContext
from gear.routing import routed


def compute(spec: dict[str, Any], progress: Callable[[int, int, int], None]) -> dict[str, Any]:
    """Return the body of the job's record; its samples are on disk by then.

    ``progress`` gets windows done, windows in all, tokens so far. What cannot be computed raises;
    a guard that failed makes the body FAILED.
    """
    config = spec["config"]
    _use_backend(config["backend"])
    mx.random.seed(config["seed"])
    samples = []
    with ExitStack() as stack:
        context = _context(spec, progress, stack)
        task = make_task(config)
        kept = task.resumable(_left(spec), context)
        if isinstance(context, TaskContext):
            context.resumed = kept
        path = record_dir(Path(spec["root"]), spec["key"]) / SAMPLES
        writer = stack.enter_context(SampleWriter(path, kept))
        for number, sample in enumerate(task.samples(context)):
            if number >= len(kept):
                writer.write(sample)
            samples.append(sample)
    body = {
        "metrics": task.metrics(samples, context),
        "coverage": context.make_caches().coverage,
        "bytes": {"accounting_only": context.method.accounting_only, **_bytes(samples)},
        "environment": {"device": str(mx.default_device())},
    }
    mx.clear_cache()
    return _judged(config, samples, body)


def _left(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of an earlier run that was killed, not of one that failed by itself."""
    root, key = Path(spec["root"]), spec["key"]
    record, path = load(root, key), record_dir(root, key) / SAMPLES
    killed = record is None or bool((record.get("error") or {}).get("signal"))
    return read_samples(path) if killed and path.is_file() else []


def _judged(
    config: dict[str, Any], samples: Sequence[dict[str, Any]], body: dict[str, Any]
) -> dict[str, Any]:
    """Return the body with its guards and status; JSON cannot hold NaN, so those go."""
    metrics = body["metrics"]
    verdicts = guards.check(config, samples, metrics, body["coverage"])
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    failed = guards.failures(verdicts)
    outcome = failure("GuardError", "; ".join(failed)) if failed else {"status": FINISHED}
    return {**body, **outcome, "metrics": finite, "guards": verdicts}


def _use_backend(backend: str) -> None:
    """Make ``backend`` MLX's default device. RuntimeError where MLX has another one."""
    if backend == "cpu":
        mx.set_default_device(mx.cpu)  # pyright: ignore[reportArgumentType]
    available = {"cpu": True, "metal": mx.metal.is_available(), "cuda": mx.cuda.is_available()}
    if not available[backend]:
        found = ", ".join(name for name, there in available.items() if there)
        raise RuntimeError(
            f"device={backend!r}: MLX here has {found}; expected {backend} from the packages"
            " installed. Set device=cpu, or install the MLX of this machine."
        )


@lru_cache(maxsize=1)
def _model(
    info: str, dtype: str, memory_gib: float, spill: Path | None
) -> tuple[Any, models.Tokenizer, PrefillStore]:
    """Return the worker's model, loaded once, and the exact prefills that its jobs share."""
    return *models.load(json.loads(info), dtype), PrefillStore(memory_gib, spill)


def _documents(spec: dict[str, Any]) -> list[Document]:
    """Return the documents. DataError where they are not those that the key was made from."""
    dataset = DatasetConfig(**spec["dataset"])
    documents = load_documents(dataset, spec["config"]["seed"])
    expected = spec["config"]["dataset"]["content_hash"]
    check_unchanged(dataset.name, content_hash(documents), expected)
    return documents


def _context(
    spec: dict[str, Any], progress: Callable[[int, int, int], None], stack: ExitStack
) -> Context:
    """Return what the job's task runs with; ``stack`` ends the packed attention with the job."""
    model, tokenizer, prefills = _model(
        json.dumps(spec["model"]), spec["config"]["dtype"],
        spec["prefill_memory_gib"], Path(spec["scratch"]) if spec["prefill_spill"] else None,
    )  # fmt: skip
    method, exact = build_method(spec["cache"]), build_method(FP16)
    measured, route = EvalConfig(**spec["config"]["eval"]), None
    packed = method.uses_gear and measured.attention == "packed"
    if packed or getattr(method, "needs_route", False):
        route = stack.enter_context(routed(model, measured.tile_tokens))
    parts: dict[str, Any] = {
        "model": model,
        "tokenizer": tokenizer,
        "config": spec["config"],
        "method": method,
        "make_caches": partial(make_caches, model, method, route),
        "exact_method": exact,
        "make_exact_caches": partial(make_caches, model, exact),
        "logprobs": LogprobStore(Path(spec["root"]), spec["baseline_key"]),
        "progress": progress,
        "prefills": prefills,
    }
    if measured.task != "downstream":
        return Context(documents=_documents(spec), **parts)
    items, questions = asked(spec, tokenizer)
    return TaskContext(
        documents=[], items=items, questions=questions, reference=_reference(spec), **parts
    )


def _reference(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fp16 arm's samples, which every item is compared with; none for that arm."""
    if spec["baseline_key"] == spec["key"]:
        return []
    path = record_dir(Path(spec["root"]), spec["baseline_key"]) / SAMPLES
    if path.is_file():
        return read_samples(path)
    raise DataError(
        f"{path}: the fp16 arm's samples are gone, and without them nothing is compared. Next"
        f" step: delete the folder {path.parent.name} below records/ and run the command again."
    )


def _bytes(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the caches' bytes by term and per layer, summed over windows as ``kv/*`` are."""
    terms: Counter[str] = Counter()
    layers: dict[int, dict[str, Any]] = {}
    for sample in samples:
        terms.update(sample["kv"]["terms"])
        for layer in sample["kv"]["per_layer"]:
            sums = layers.setdefault(layer["layer"], {**layer, "stored_bytes": 0, "fp16_bytes": 0})
            sums["stored_bytes"] += layer["stored_bytes"]
            sums["fp16_bytes"] += layer["fp16_bytes"]
    return {"terms": dict(terms), "per_layer": list(layers.values())}
