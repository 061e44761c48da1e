"""The rows of a task's split, with the hub's fields, from one of three sources.

package: what `python -m evals.assets --tasks` fetched (evals/packages.py); hub: through `datasets`,
which keeps its own cache and honours its offline variables; file: .jsonl or .parquet files of one's
own. No remote code, and no MLX.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from evals import packages
from evals.data_files import DataError, read_rows
from evals.schema import DatasetConfig
from evals.task_definitions import Definition

SOURCES = ("package", "hub", "file")

Rows = list[dict[str, Any]]


def rows(
    cfg: DatasetConfig,
    task: Definition,
    split: str,
    first: int | None = None,
    *,
    shown: bool = False,
) -> Rows:
    """Return the rows of a split, or the first of them, in the source's order.

    `shown`: they become exemplars, so a file is `dataset.fewshot_path`.

    Raises:
        DataError: they are not there or not readable; says which file is wanted and how to get it.
    """
    if cfg.source == "package":
        return packages.read(task, split)[:first]
    if cfg.source == "hub":
        return _hub(cfg, task, split, first)
    return list(islice(_file(cfg, task, shown), first))


def other_split(cfg: DatasetConfig, task: Definition) -> str | None:
    """Return the split that has the exemplars; None: they are the scored split's first rows."""
    split = task.fewshot_split
    if cfg.source == "file":
        return split if cfg.fewshot_path else None
    if cfg.source == "package":  # it seldom has train; validation serves where test is scored
        there = [name for name in (split, "validation") if name in packages.splits(task)]
        split = there[0] if there else task.split
    return None if split == task.split else split


def _hub(cfg: DatasetConfig, task: Definition, split: str, first: int | None) -> Rows:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    arguments = {**task.arguments(cfg), "split": split}
    try:
        table = datasets.load_dataset(task.repo, **arguments)
    except Exception as error:  # `datasets` has a dozen unrelated kinds for "not there"
        raise DataError(_not_loaded(task, error, arguments)) from error
    return list(table if first is None else table.select(range(min(first, len(table)))))


def _not_loaded(task: Definition, error: Exception, arguments: dict[str, Any]) -> str:
    cause = next(iter(str(error).splitlines()), "").rstrip(".")
    call = ", ".join([repr(task.repo), *(f"{key}={value!r}" for key, value in arguments.items())])
    fewshot = arguments["split"] != task.split
    file = f"{'FEWSHOT' if fewshot else 'ITEMS'}/{task.name}.parquet"
    option = "dataset.fewshot_path=FEWSHOT" if fewshot else "dataset.path=ITEMS"
    return (
        f"dataset.task={task.name!r}: {task.repo} (split {arguments['split']}) could not be "
        f"loaded: {type(error).__name__}: {cause}. Expected: the hub within reach, or the data set "
        "in the cache of `datasets` (HF_HOME; HF_HUB_OFFLINE=1 asks only the cache). Next step: on "
        f"a machine with access write the file {file}:\n"
        "  import datasets\n"
        f"  datasets.load_dataset({call}).to_parquet('{file}')\n"
        "bring it here and run with\n"
        f"  dataset.source=file {option}"
    )


def _file(cfg: DatasetConfig, task: Definition, shown: bool) -> Iterator[dict[str, Any]]:
    option = "dataset.fewshot_path" if shown else "dataset.path"
    given = cfg.fewshot_path if shown else cfg.path
    path = Path(str(given)).expanduser().absolute()
    if path.is_dir():
        path = _of_task(path, task.name, option)
    try:
        yield from read_rows(path)
    except OSError as error:
        raise DataError(
            f"{option}={given!r}, {path}: {error.strerror or error}; expected a .jsonl or .parquet "
            f"file of the rows of {task.name}, or a folder with {task.name}.jsonl or .parquet. "
            "Next step: check the path and its permissions."
        ) from error
    except DataError as error:
        raise DataError(f"{option}={given!r}, {path}: {error}") from error


def _of_task(folder: Path, name: str, option: str) -> Path:
    """Return the file of one task in a folder of many."""
    for suffix in (".parquet", ".jsonl"):
        if (path := folder / f"{name}{suffix}").is_file():
            return path
    raise DataError(
        f"{option}, {folder}: holds neither {name}.parquet nor {name}.jsonl; expected one of them, "
        f"with the fields of the hub's data set. Next step: write it, or name a file."
    )
