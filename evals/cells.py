"""The cells of a command's table: every job of it with its record, the fp16 arms included.

A command is composed and its jobs are built, so that each cell has the key under which its record
lies; nothing is computed. What cannot be built here, because its model or data are not on this
machine, is a cell without a key that says why. No MLX, no MLflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from evals import record as store
from evals.calibrated import CalibrationMissing
from evals.cell_names import Place, places
from evals.compose import PlannedJob, baseline_words, plan
from evals.job import FP16, build_job, build_method, has_baseline, measured
from evals.record import plain, run_key
from evals.schema import Config
from evals.validate import check_plan

Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One job of a command."""

    name: str
    """Readable, unique among the cells of its command: method, dataset, model."""
    words: list[str]
    """Overrides of this one job: ``python run.py WORDS`` remakes it."""
    config: Config
    key: str | None
    """Run key; None where the job cannot be built here."""
    record: Record | None
    problem: str | None
    """Why it cannot be built, in one line."""


@dataclass(frozen=True)
class _Arm:
    """A job before it has its name."""

    words: list[str]
    config: Config
    key: str | None
    problem: str | None


def typed(argv: Sequence[str]) -> list[str]:
    """Return the overrides of a command as typed behind run.py: ``-m`` and ``--config-dir`` too.

    ValueError for a flag that is not used here or a folder that does not exist.
    """
    from hydra._internal.utils import get_args_parser

    from evals.cli import words_of

    args = get_args_parser().parse_intermixed_args(list(argv))
    return [*words_of(args), *(["hydra.mode=MULTIRUN"] if args.multirun else [])]


def cells(words: list[str], root: Path) -> list[Cell]:
    """Return all cells of a command's overrides, fp16 arms before what is compared, each key once.

    Raises ConfigError (SettingError) where the command itself cannot be used.
    """
    planned = plan(words)
    check_plan(planned)
    arms: dict[str, _Arm] = {}
    for job in planned.jobs:
        for arm in _arms(job, root):
            arms.setdefault(arm.key or run_key(described(arm.config)), arm)
    found = list(arms.values())
    return [
        Cell(
            place.name, arm.words, arm.config, arm.key,
            store.load(root, arm.key) if arm.key else None, arm.problem,
        )
        for arm, place in zip(found, where([arm.config for arm in found]), strict=True)
    ]  # fmt: skip


def where(configs: Sequence[Config]) -> list[Place]:
    """Return the row and column of each of a command's configs."""
    return places([described(config) for config in configs])


def _arms(job: PlannedJob, root: Path) -> Iterator[_Arm]:
    """Yield a planned job's fp16 arm, where it has one, and itself."""
    key = baseline_key = problem = None
    try:
        built = build_job(job.config, root)
        key, baseline_key = built.key, built.baseline and built.baseline.key
    except CalibrationMissing as error:  # that of this job alone: its fp16 arm can be built
        problem = " ".join(str(error).split())
        baseline_key = build_job(replace(job.config, cache=FP16), root).key
    except (ValueError, OSError) as error:
        problem = " ".join(str(error).split())
    if has_baseline(job.config):
        fp16 = replace(job.config, cache=FP16)
        unbuilt = None if baseline_key else problem
        yield _Arm(baseline_words(job.words), fp16, baseline_key, unbuilt)
    yield _Arm(job.words, job.config, key, problem)


def described(config: Config) -> dict[str, Any]:
    """Return what a config says of its result without reading model or data.

    It names settings as a record's config does. Layers are those that are set one by one, else one.
    """
    method = build_method(config.cache)
    return plain(
        {
            "model": asdict(config.model),
            "dataset": asdict(config.dataset),
            "eval": measured(config.eval, method),
            "cache": {
                "name": config.cache["name"],
                "layers": method.plan(max([0, *config.gear.by_layer]) + 1),
            },
            "seed": config.seed,
            "device": config.device,
        }
    )
