"""The items of a downstream task: rows with the hub's fields, their exemplars, lm-eval's tasks.

`load_items` reads them (evals/task_rows.py) as the task's YAML says (evals/task_definitions.py);
`make_tasks` gives lm-eval's own task objects, whose data are these items, for prompts, requests,
filters and metrics. Exemplars are the first rows of their split and the same for every item, so
that prompts share their beginning. No MLX; lm_eval is imported when first needed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from evals import task_definitions
from evals.data_files import DataError, nearest
from evals.schema import DatasetConfig
from evals.task_definitions import Definition, quiet
from evals.task_rows import SOURCES, other_split, rows

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

Row = dict[str, Any]

_EXEMPLARS = "exemplars"


@dataclass(frozen=True)
class Item:
    """One question. `id` ("<task>-<index>") is a plain file name, unique in the run; `index` is
    its place in the source's split, before the limit."""

    id: str
    task: str
    index: int
    row: Row


@dataclass(frozen=True)
class Items:
    """What is asked. ``total`` counts the items before the limit."""

    scored: list[Item]
    fewshot: dict[str, list[Row]]
    """The exemplars' rows by task; none where the YAML holds them or there are none."""
    total: int
    fewshot_from: dict[str, str] = field(default_factory=dict)
    """Where they come from, as "train[:5]"; the scored split's own first rows are not scored."""
    definition: str = ""
    """Hash of the tasks' YAML: prompts, exemplars, filters and metrics."""

    @property
    def content_hash(self) -> str:
        """Return a sha256 (64 hex digits) over items, exemplars and definition."""
        scored = [[item.id, item.row] for item in self.scored]
        content = [scored, self.fewshot, self.definition]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_items(cfg: DatasetConfig, seed: int) -> Items:
    """Return the items of `cfg.task`, in the source's order, subtask by subtask.

    With `cfg.limit` they are a subset that `seed` picks out of all. With `cfg.min_context_tokens`
    all are returned: how long a context is only a tokenizer knows, see :func:`narrow`.

    Raises:
        DataError: an unusable setting or unknown task; rows that are not there (with the file
            that is wanted and how to get it) or that the task cannot use.
    """
    _check(cfg)
    scored: list[Item] = []
    fewshot: dict[str, list[Row]] = {}
    fewshot_from: dict[str, str] = {}
    found = task_definitions.definitions(cfg)
    for task in found:
        items, exemplars, where = _of_task(cfg, task)
        scored += items
        if exemplars:
            fewshot[task.name], fewshot_from[task.name] = exemplars, where
    _plain([item.row for item in scored])
    definition = task_definitions.fingerprint(found)
    loaded = Items(scored, fewshot, len(scored), fewshot_from, definition)
    return loaded if cfg.min_context_tokens else _limited(loaded, cfg.limit, seed)


def narrow(
    items: Items, cfg: DatasetConfig, seed: int, context_tokens: Callable[[Item], int]
) -> Items:
    """Apply `cfg.min_context_tokens` and then `cfg.limit`; `total` counts the long enough ones.

    For who has a tokenizer: `context_tokens` gives an item's length with its exemplars. Without
    `min_context_tokens` the items are returned as they are.
    """
    if (least := cfg.min_context_tokens) is None:
        return items
    long = [item for item in items.scored if context_tokens(item) >= least]
    if not long:
        raise DataError(
            f"dataset.min_context_tokens={least}: none of {len(items.scored)} items has so much "
            "context. Next step: lower it, or raise dataset.num_fewshot."
        )
    return _limited(replace(items, scored=long, total=len(long)), cfg.limit, seed)


def make_tasks(cfg: DatasetConfig, items: Items) -> dict[str, ConfigurableTask]:
    """Return lm-eval's task for each `Item.task`; `eval_docs` are that task's items in order.

    Raises:
        DataError: the rows do not have the fields that the task's templates ask for.
    """
    by_task: dict[str, list[Row]] = {}
    for item in items.scored:
        by_task.setdefault(item.task, []).append(item.row)
    found = {task.name: task for task in task_definitions.definitions(cfg)}
    made = {}
    for name, own in by_task.items():
        task = found[name]
        made[name] = _made(task, own, items.fewshot.get(name, []), task.shots(cfg))
    return made


def _check(cfg: DatasetConfig) -> None:
    """Refuse settings that a task cannot use, before anything is read."""
    if cfg.task is None:
        raise DataError(
            f"dataset.task=None: dataset={cfg.name} needs a task's name. Next step: add "
            "dataset.task=NAME, as lm-eval calls it."
        )
    if cfg.source not in SOURCES:
        raise DataError(
            f"dataset.source={cfg.source!r} has no rows of tasks: {nearest(cfg.source, SOURCES)}"
        )
    least = {"limit": 1, "num_fewshot": 0, "min_context_tokens": 1}
    for name, lowest in least.items():
        value = getattr(cfg, name)
        if value is not None and value < lowest:
            raise DataError(
                f"dataset.{name}={value}: allowed are null and whole numbers from {lowest}. "
                "Next step: correct it or leave it out."
            )
    if cfg.source == "file" and not cfg.path:
        raise DataError(
            "dataset.path=None: dataset.source=file needs a .jsonl or .parquet file, or a folder "
            "of TASK.jsonl or TASK.parquet. Next step: add dataset.path=FILE."
        )
    for name in ("path", "fewshot_path"):
        if cfg.source != "file" and (value := getattr(cfg, name)) is not None:
            raise DataError(
                f"dataset.{name}={value!r} is not used with dataset.source={cfg.source}; "
                "allowed: null. Next step: add dataset.source=file."
            )


def _of_task(cfg: DatasetConfig, task: Definition) -> tuple[list[Item], list[Row], str]:
    """Return the items of one (sub)task, the rows of its exemplars and where those come from."""
    loaded, fewshot = task.functions
    process = loaded.get("process_docs")
    own = list(enumerate(_processed(process, rows(cfg, task, task.split))))
    shots, held = task.shots(cfg), task.exemplars
    exemplars: list[Row] = []
    where = ""
    if shots and held is None:
        if (split := other_split(cfg, task)) is None:
            where = f"{task.split}[:{shots}]"
            exemplars, own = [row for _, row in own[:shots]], own[shots:]
        else:
            where = f"{split}[:{shots}]"
            process = fewshot.get("process_docs", process)
            first = shots if process is None else None
            exemplars = _processed(process, rows(cfg, task, split, first, shown=True))[:shots]
    available = held if held is not None else len(exemplars)
    if shots > available:
        raise DataError(
            f"dataset.num_fewshot={shots}: {task.name} has {available} exemplars here"
            f"{f' ({where})' if where else ''}. Next step: lower it."
        )
    if not own:
        raise DataError(f"dataset.task={task.name!r}: its split {task.split!r} holds no rows.")
    name = re.sub(r"[^\w.-]", "_", task.name)
    return [Item(f"{name}-{n}", task.name, n, row) for n, row in own], exemplars, where


def _processed(process: Callable[..., Any] | None, found: list[Row]) -> list[Row]:
    """Return rows after the task's own process_docs, which may change, drop or reorder them."""
    if process is None or not found:
        return found
    import datasets

    with quiet():
        return list(process(datasets.Dataset.from_list(found)))


def _limited(items: Items, limit: int | None, seed: int) -> Items:
    """Return `limit` of the items, picked by `seed`, in the order they had."""
    count = len(items.scored)
    if limit is None or limit >= count:
        return items
    chosen = np.sort(np.random.default_rng(seed).choice(count, limit, replace=False))
    return replace(items, scored=[items.scored[i] for i in chosen])


def _plain(found: Sequence[Row]) -> None:
    """Refuse rows that are not text and numbers: they could be neither hashed nor kept."""
    try:
        json.dumps(found)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"dataset.task: a row holds what JSON cannot: {error}. Next step: use a task of text."
        ) from error


def _made(task: Definition, own: list[Row], exemplars: list[Row], shots: int) -> ConfigurableTask:
    """Build lm-eval's task on these rows: nothing is downloaded, the sampler draws nothing."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    config, fewshot = deepcopy(task.functions)
    fewshot |= {"sampler": "first_n", "process_docs": None}
    if task.exemplars is None:
        # a name of its own: lm-eval keeps an item out of exemplars of the scored split's name
        fewshot["split"] = _EXEMPLARS

    def given(**_: Any) -> dict[str, Any]:
        return {task.split: datasets.Dataset.from_list(own), _EXEMPLARS: exemplars}

    config |= {"task": task.name, "custom_dataset": given, "num_fewshot": shots}
    config |= {"process_docs": None, "fewshot_config": fewshot}
    config["metadata"] = config["metadata"] if isinstance(config.get("metadata"), dict) else {}
    config = {key: value for key, value in config.items() if key not in ("tag", "group")}
    try:
        with quiet():
            return ConfigurableTask(config=config)
    except Exception as error:  # templates raise whatever a missing field makes them
        raise DataError(
            f"dataset.task={task.name!r}: its rows (fields: {', '.join(own[0])}) do not fit its "
            f"templates: {type(error).__name__}: {error}. Expected: the fields of {task.repo}. "
            "Next step: give rows with those fields."
        ) from error
