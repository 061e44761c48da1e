"""What an lm-eval task is: its YAML, found by name, and where that YAML says its rows are.

Indexed are this project's folder (evals/lm_tasks) and, for MMLU, BBH and LongBench, lm-eval's own
folder of that group, which its YAML here refers to: a moment. Only ``dataset=lm_eval`` indexes all
that lm-eval carries, which takes half a minute. lm_eval is imported when first needed; no MLX.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.data_files import DataError, nearest
from evals.schema import DatasetConfig

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

FOLDER = Path(__file__).resolve().parent / "lm_tasks"
ALL_OF_LM_EVAL = "lm_eval"
"""The name of the dataset option whose tasks are lm-eval's own."""
_PACKAGED = {
    "mmlu": ("mmlu", "mmlu/default"),
    "bbh": ("bbh_cot", "bbh/cot_fewshot"),
    "longbench": ("longbench", "longbench"),
}
"""Start of a task's name: the group here, and lm-eval's folder that is indexed with it."""
_STRUCTURE = ("group", "group_alias", "task", "aggregate_metric_list", "metadata")
"""A group's fields that are not laid over its tasks."""

Config = dict[str, Any]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep progress bars and lm-eval's warnings to a task's author off the screen; errors show."""
    import datasets

    logger, bars = logging.getLogger("lm_eval"), datasets.is_progress_bar_enabled()
    before = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(before)
        if bars:
            datasets.enable_progress_bars()


@dataclass(frozen=True)
class Definition:
    """One (sub)task: ``config`` is its YAML with ``overrides`` (its groups' fields) laid over it.

    Functions in ``config`` are still names; :attr:`functions` has them loaded.
    """

    name: str
    config: Config
    overrides: Config = field(repr=False)
    path: Path

    @property
    def repo(self) -> str:
        """Return the hub's id of the data."""
        return self.config["dataset_path"]

    @property
    def subset(self) -> str | None:
        """Return the hub's configuration name."""
        return self.config.get("dataset_name")

    def arguments(self, cfg: DatasetConfig) -> Config:
        """Return what `datasets.load_dataset` gets beside repository and split."""
        given = dict(self.config.get("dataset_kwargs") or {})
        given.pop("trust_remote_code", None)  # never: no remote code is run
        name = {"name": self.subset} if self.subset else {}
        pinned = {"revision": cfg.revision} if cfg.revision else {}
        return {**name, **given, **pinned}

    @property
    def split(self) -> str:
        """Return the split that is scored: test, else validation."""
        return self.config.get("test_split") or self.config["validation_split"]

    @property
    def exemplars(self) -> int | None:
        """Return how many exemplars the YAML itself holds; None where they come from a split."""
        fewshot = self.config.get("fewshot_config") or {}
        if self.config.get("fewshot_split") or fewshot.get("split") or not fewshot.get("samples"):
            return None
        samples = fewshot["samples"]
        return len(samples) if isinstance(samples, list) else len(self.functions[1]["samples"]())

    @property
    def fewshot_split(self) -> str:
        """Return the split of the exemplars, by lm-eval's rule."""
        fewshot, names = self.config.get("fewshot_config") or {}, self.config
        named = fewshot.get("split") or names.get("fewshot_split")
        return named or names.get("training_split") or names.get("validation_split") or self.split

    def shots(self, cfg: DatasetConfig) -> int:
        """Return how many exemplars stand in front of an item."""
        wanted = cfg.num_fewshot
        return self.config.get("num_fewshot") or 0 if wanted is None else wanted

    @cached_property
    def functions(self) -> tuple[Config, Config]:
        """Return the YAML with its functions loaded, and its fewshot_config.

        Raises:
            DataError: a module that the task's functions need is not installed.
        """
        from lm_eval.tasks._yaml_loader import load_yaml

        try:
            loaded = {**load_yaml(self.path, resolve_func=True), **self.overrides}
        except ImportError as error:
            extra = "longbench" if self.name.startswith("longbench") else "EXTRA"
            raise DataError(
                f"dataset.task={self.name!r}: a module that its scoring needs is missing: {error} "
                f"Next step: pip install 'lm-eval[{extra}]'."
            ) from error
        return loaded, loaded.get("fewshot_config") or {}


def definitions(cfg: DatasetConfig) -> list[Definition]:
    """Return the subtasks of `cfg.task` in their group's order; a single task is a list of one.

    Raises:
        DataError: no such task (with near names), or one that is not a YAML of text.
    """
    everything = cfg.name == ALL_OF_LM_EVAL
    names = (each for start, each in _PACKAGED.items() if str(cfg.task).startswith(start))
    group, folder = next(names, ("", ""))
    manager = _manager(None if everything else folder)
    if cfg.task not in manager.task_index:
        known = [name for name in manager.all_tasks if not name.startswith("_")]
        elsewhere = "" if everything else " Any other task of lm-eval: add dataset=lm_eval."
        raise DataError(
            f"dataset.task={cfg.task!r} is unknown; {_shortened(cfg.task, known)}.{elsewhere} "
            "Next step: correct the name."
        )
    found = {d.name: d for d in _expanded(manager, str(cfg.task), {})}
    if group and not everything:  # a part of it alone is asked as it is in the group
        found |= {d.name: d for d in _expanded(manager, group, {}) if d.name in found}
    return list(found.values())


def fingerprint(found: list[Definition]) -> str:
    """Return a sha256 over the definitions: prompts, exemplars, filters and metrics as written.

    Functions count by their name, so that a moved installation is the same.
    """
    plain = [[d.name, _without_paths(d.config)] for d in found]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


def _without_paths(value: Any) -> Any:
    """Return a config in which a function's "/folder/module.name" is "module.name"."""
    if isinstance(value, dict):
        return {key: _without_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_paths(each) for each in value]
    parents = tuple(str(folder) for folder in (FOLDER, _lm_eval_tasks()))
    return Path(value).name if isinstance(value, str) and value.startswith(parents) else value


def _shortened(task: str | None, known: list[str]) -> str:
    """Return "did you mean …? Available: …" of at most 40 names."""
    text = nearest(str(task), known)
    guess, _, names = text.partition("Available: ")
    listed = names.split(", ")
    rest = f" and {len(listed) - 40} more" if len(listed) > 40 else ""
    return f"{guess}Available: {', '.join(listed[:40])}{rest}"


def _lm_eval_tasks() -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).resolve().parent


@cache
def _manager(packaged: str | None) -> TaskManager:
    """Return lm-eval's index of this project's tasks and one of its folders; None = all of its."""
    from lm_eval.tasks import TaskManager

    with quiet():
        if packaged is None:
            return TaskManager()
        folders: list[str | Path] = [_lm_eval_tasks() / packaged] if packaged else []
        return TaskManager(include_path=[*folders, FOLDER], include_defaults=False)


def _expanded(manager: TaskManager, name: str, overrides: Config) -> Iterator[Definition]:
    """Yield the tasks below `name`, with what lm-eval's groups lay over them."""
    from lm_eval.tasks._index import Kind

    entry = manager.task_index.get(name)
    if entry is None:
        raise DataError(f"dataset.task: its group names the task {name!r}, which is not indexed.")
    config = entry.cfg or {}
    if entry.kind is Kind.TAG:
        for child in sorted(entry.tags):
            yield from _expanded(manager, child, overrides)
    elif entry.kind is Kind.GROUP:
        own = {k: v for k, v in config.items() if k not in _STRUCTURE and k != "tag"}
        members = config["task"] if isinstance(config["task"], list) else [config["task"]]
        for member in members:
            child, extra = _member(member, name)
            yield from _expanded(manager, child, {**own, **overrides, **extra})
    else:
        merged = {**config, **overrides}
        yield _checked(Definition(name, merged, overrides, Path(str(entry.yaml_path))))


def _member(member: Any, group: str) -> tuple[str, Config]:
    """Return the name of a group's member and the fields that the group gives it alone."""
    if isinstance(member, str):
        return member, {}
    named = member.get("task", member.get("group"))
    if isinstance(named, str) and not {"task", "group"} <= set(member):
        return named, {k: v for k, v in member.items() if k not in ("task", "group")}
    raise DataError(
        f"dataset.task: the group {group!r} defines tasks inside itself, which is not supported. "
        "Next step: name one of its tasks."
    )


def _checked(found: Definition) -> Definition:
    """Refuse what cannot be asked through text and rows."""
    config = found.config
    if "class" in config or config.get("custom_dataset") or not config.get("dataset_path"):
        raise DataError(
            f"dataset.task={found.name!r}: makes its data or requests by code of its own; expected "
            "a YAML task with a dataset_path. Next step: use another task."
        )
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        raise DataError(f"dataset.task={found.name!r}: asks about images or sound; expected text.")
    if not config.get("test_split") and not config.get("validation_split"):
        raise DataError(f"dataset.task={found.name!r}: its YAML names no test or validation split.")
    return found
