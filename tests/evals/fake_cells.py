"""Cells as evals.cells makes them, with records that nothing computed: for the tests of tables."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

from evals.cells import Cell, where
from evals.schema import Config, DatasetConfig, EvalConfig, ModelConfig
from gear.config import GearConfig
from gear.methods import METHODS
from tests.evals import fake_records

COMMIT = {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False}
METRIC = "exact_match,strict-match"


def config(
    cache: str, model: str, dataset: str, settings: GearConfig | None = None, **measured: Any
) -> Config:
    """Return the typed config of a job; a dataset other than embedded is a task."""
    task = dataset != "embedded"
    name = "downstream" if task else "decode"
    own = {"settings": settings or GearConfig()} if cache not in ("fp16", "mlx_quant") else {}
    return Config(
        model=ModelConfig(name=model, source="hub"),
        dataset=DatasetConfig(
            name=dataset, source="package", task=dataset if task else None,
            metric=METRIC if task else None,
        ),
        cache={"name": cache, "_target_": METHODS[cache], **own},
        eval=EvalConfig(name=name, task="downstream" if task else "perplexity", **measured),
    )  # fmt: skip


def groups(job: Config) -> dict[str, Any]:
    """Return the groups of a record's config that a job's config sets."""
    kept = ("name", "task", "confidence", "allow_uncompressed")
    walk = {} if job.dataset.task else {"prefill_tokens": 512, "scored_tokens": 128}
    return {
        "model": {"name": job.model.name},
        "dataset": {"name": job.dataset.name, "metric": job.dataset.metric},
        "eval": {**{n: v for n, v in asdict(job.eval).items() if n in kept}, **walk},
    }


def answered(job: Config, right: int, exact: int = 50) -> dict[str, Any]:
    """Return the record of a task's job."""
    return fake_records.answered(job.cache["name"], right, exact=exact, **groups(job))


def cells(jobs: list[tuple[Config, dict[str, Any] | None, str | None]]) -> list[Cell]:
    """Return the cells of (config, record, problem); keys and run ids follow from their names."""
    made = []
    for (job, record, problem), place in zip(jobs, where([j for j, *_ in jobs]), strict=True):
        key = hashlib.sha256(place.name.encode()).hexdigest()
        words = [f"model={job.model.name}", f"dataset={job.dataset.name}"]
        words += [f"cache={job.cache['name']}"]
        if record is not None:
            where_made = {**record["environment"], "git": COMMIT}
            record = {**record, "key": key, "environment": where_made}
            record["mlflow_run_id"] = key[:32]
        made.append(Cell(place.name, words, job, None if problem else key, record, problem))
    return made


def paper() -> list[Cell]:
    """Return two models on two tasks, with one of everything that a table has to show."""
    absent = "model.repo='owner/name': not in the local cache"
    jobs: list[tuple[Config, dict[str, Any] | None, str | None]] = []
    for model, data in (
        ("llama3_8b", "gsm8k_cot"), ("llama3_8b", "aqua_cot"), ("qwen3_8b", "gsm8k_cot"),
        ("qwen3_8b", "aqua_cot"),
    ):  # fmt: skip
        fp16 = config("fp16", model, data)
        kivi, four = config("kivi", model, data), config("kivi", model, data, GearConfig(bits=4))
        gear = config("gear", model, data)
        plain = config("mlx_quant", model, data)
        if (model, data) == ("qwen3_8b", "aqua_cot"):
            jobs += [(job, None, absent) for job in (fp16, kivi, four, gear, plain)]
            continue
        dense = answered(four, 47)
        dense["bytes"]["accounting_only"] = True
        died = fake_records.failed("gear", **groups(gear))
        jobs += [
            (fp16, answered(fp16, 50), None),
            (kivi, answered(kivi, 30), None),
            (four, dense, None),
            (gear, died if model == "qwen3_8b" else answered(gear, 51), None),
            (plain, None if data == "aqua_cot" else answered(plain, 49), None),
        ]
    return cells(jobs)


def perplexity() -> list[Cell]:
    """Return fp16 and GEAR at two ranks on plain text, of too few tokens; one is off for sure."""
    jobs = [
        config("fp16", "tiny", "embedded", allow_uncompressed=True),
        config("gear", "tiny", "embedded", allow_uncompressed=True),
        config("gear", "tiny", "embedded", GearConfig(rank=8), allow_uncompressed=True),
    ]
    records = [
        fake_records.finished("fp16", **groups(jobs[0])),
        fake_records.finished("gear", 0.125, **groups(jobs[1])),
        fake_records.finished("gear", 0.005, **groups(jobs[2])),
    ]
    return cells([(job, record, None) for job, record in zip(jobs, records, strict=True)])
