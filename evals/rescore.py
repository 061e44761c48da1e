"""Read the answers of finished downstream runs again, without the model.

``python scripts/rescore.py`` goes through every downstream record (or those whose keys are given),
puts its stored answers through the task's filters and metrics as they are now, and prints what was
recorded beside what comes out. ``--write`` keeps the new scores in samples and record. It exits
with 1 where numbers differ and nothing was written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evals import record as store
from evals.data_files import DataError
from evals.items import Item, Items, load_items, make_tasks
from evals.questions import Questions, RetrievalQuestions, TaskQuestions
from evals.record import FINISHED, SAMPLES, SampleWriter, read_samples, record_dir, results_root
from evals.schema import DatasetConfig
from evals.settings import OF_PACKED_ATTENTION
from evals.task_metrics import task_metrics

Sample = dict[str, Any]
Record = dict[str, Any]


def rescored(
    record: Record, samples: Sequence[Sample], reference: Sequence[Sample], paths: Mapping[str, Any]
) -> tuple[list[Sample], dict[str, float]]:
    """Return a run's samples with new scores, and the metrics that follow from them.

    ``paths`` are `dataset.path` and `dataset.fewshot_path` where the items came from a file: a
    record does not hold them. DataError where the items are not those of the run.
    """
    config = record["config"]
    items, questions = _questions(config, samples, paths)
    by_id = {item.id: item for item in items.scored}
    fresh = []
    for sample in samples:
        scores, read = questions.scores(by_id[sample["id"]], _responses(sample))
        fresh.append({**sample, "scores": scores, "read": read})
    return fresh, task_metrics(fresh, reference, questions, config)


def _responses(sample: Sample) -> list[Any]:
    """Return what the model answered."""
    if "text" in sample:
        return [sample["text"]]
    if "is_greedy" in sample:
        return list(zip(sample["loglikelihoods"], sample["is_greedy"], strict=True))
    return list(sample["loglikelihoods"])


def _questions(
    config: Mapping[str, Any], samples: Sequence[Sample], paths: Mapping[str, Any]
) -> tuple[Items, Questions]:
    """Return the items of a run and their questions."""
    values, chat = config["dataset"], config["eval"]["chat_template"]
    names = [f.name for f in fields(DatasetConfig) if f.name in values]
    dataset = DatasetConfig(**{name: values[name] for name in names}, **paths)
    if dataset.source == "generated":  # a sample holds what its score needs
        found = [Item(s["id"], s["task"], s["index"], s) for s in samples]
        return Items(found, {}, len(found)), RetrievalQuestions()
    items = load_items(dataset, config["seed"])
    if items.content_hash != values["content_hash"]:
        raise DataError(
            f"dataset={dataset.name}: its content hash is {items.content_hash[:12]}, expected "
            f"{values['content_hash'][:12]}. Next step: give the file of that run with --path."
        )
    # the prompt is not used, only what the task makes of an answer
    render = (lambda *_, **__: "") if chat else None
    return items, TaskQuestions(make_tasks(dataset, items), items.scored, render)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("key", nargs="*", help="keys of records, or their beginnings; default: all")
    parser.add_argument("--path", help="dataset.path of the run, where items came from a file")
    parser.add_argument("--fewshot-path", help="dataset.fewshot_path of the run")
    parser.add_argument("--write", action="store_true", help="keep the new scores")
    arguments = parser.parse_args(argv)
    given = {"path": arguments.path, "fewshot_path": arguments.fewshot_path}
    paths = {name: path for name, path in given.items() if path}
    root, console, differs = results_root(), Console(), False
    for record in store.records(root):
        if not _wanted(record, arguments.key):
            continue
        try:
            fresh, metrics = _again(root, record, paths)
        except (ValueError, OSError) as error:
            print(f"error: {record['key'][:8]}: {error}", file=sys.stderr)
            return 1
        changed = {n: v for n, v in metrics.items() if record["metrics"].get(n) != v}
        differs |= bool(changed)
        _show(console, record, metrics)
        if arguments.write and changed:
            _keep(root, record, fresh, metrics)
    return int(differs and not arguments.write)


def _wanted(record: Record, keys: Sequence[str]) -> bool:
    """Say whether a record is a finished downstream one that was asked for."""
    downstream = record["config"]["eval"]["task"] == "downstream" and record["status"] == FINISHED
    return downstream and (not keys or any(record["key"].startswith(key) for key in keys))


def _again(
    root: Path, record: Record, paths: Mapping[str, Any]
) -> tuple[list[Sample], dict[str, float]]:
    """Return a record's samples and metrics, made anew; its fp16 arm is found by its config."""
    samples = read_samples(record_dir(root, record["key"]) / SAMPLES)
    reference = _reference(root, record)
    return rescored(record, samples, reference, paths)


def _reference(root: Path, record: Record) -> list[Sample]:
    """Return the samples of the fp16 arm of a record; none for that arm itself."""
    if record["config"]["cache"]["name"] == "fp16":
        return []
    alike = _without_cache(record["config"])
    for other in store.records(root):
        config = other["config"]
        if config["cache"]["name"] == "fp16" and _without_cache(config) == alike:
            return read_samples(record_dir(root, other["key"]) / SAMPLES)
    raise DataError("its fp16 arm has no record. Next step: run the sweep's command again.")


def _without_cache(config: Record) -> Record:
    """Return what a run and its fp16 arm have in common."""
    unlike = [name.removeprefix("eval.") for name in OF_PACKED_ATTENTION]
    measured = {n: v for n, v in config["eval"].items() if n not in unlike}
    return {**config, "cache": None, "eval": measured}


def _keep(root: Path, record: Record, samples: list[Sample], metrics: dict[str, float]) -> None:
    """Write the new scores: samples first, because the record is the commit."""
    with SampleWriter(record_dir(root, record["key"]) / SAMPLES, samples):
        pass
    store.commit(root, record["key"], {**record, "metrics": {**record["metrics"], **metrics}})


def _show(console: Console, record: Record, metrics: dict[str, float]) -> None:
    """Print what was recorded beside what comes out now."""
    config = record["config"]
    names = " · ".join(config[group]["name"] for group in ("cache", "model", "dataset"))
    table = Table(title=f"{record['key'][:8]} · {names}", title_justify="left")
    for heading in ("metric", "recorded", "now"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for name, value in metrics.items():
        old = record["metrics"].get(name)
        table.add_row(name, "-" if old is None else f"{old:.6g}", f"{value:.6g}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
