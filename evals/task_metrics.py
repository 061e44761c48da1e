"""The numbers of a downstream run, from its samples alone: no MLX, so they can be made again."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from evals import accuracy
from evals.agreement import paired_metrics
from evals.questions import Questions
from evals.statistics import aggregate_interval

Sample = dict[str, Any]
LENGTHS = (0, 4000, 8000)
"""Where the buckets of LongBench-E begin, in words."""


def task_metrics(
    samples: Sequence[Sample], reference: Sequence[Sample], questions: Questions, config: Any
) -> dict[str, float]:
    """Return ``quality/*`` with intervals and, against the fp16 arm's samples, ``fidelity/*``."""
    found = quality_metrics(samples, questions, config)
    if reference:
        measured = config["eval"]
        found |= paired_metrics(
            samples, reference, headline(samples, config), measured["confidence"],
            resamples=measured["bootstrap_samples"], seed=config["seed"],
        )  # fmt: skip
    return found


def headline(samples: Sequence[Sample], config: Any) -> str:
    """Return the metric that stands for the task: ``dataset.metric``, else the first one."""
    return config["dataset"].get("metric") or next(iter(samples[0]["scores"]))


def metric_name(metric: str, what: str, config: Any) -> str:
    """Return the name of a quality metric: ``quality/acc/arc_easy``, with what is not default."""
    name, measured = metric.replace(",", "-"), config["eval"]
    if (shots := config["dataset"].get("num_fewshot")) is not None:
        what += f"-{shots}shot"
    if measured.get("chat_template"):
        what += "-chat"
    if measured["prefill"] == "streaming":
        what += f"-streaming{measured['prefill_chunk']}"
    return f"quality/{name}/{what}"


def quality_metrics(
    samples: Sequence[Sample], questions: Questions, config: Any
) -> dict[str, float]:
    """Return every metric of the task with its interval; of a group its subtasks' too, without.

    Items count alike, so a group's number is weighted by the sizes of its subtasks; in the one that
    ends in ``-by_task`` the subtasks count alike, as LongBench and BBH average. Where rows tell how
    long their input is (LongBench), each bucket of lengths has a number.
    """
    found: dict[str, float] = {}
    names = dict.fromkeys(name for sample in samples for name in sample["scores"])
    for name in names:
        values = [s["scores"][name] for s in samples if name in s["scores"]]
        tasks = {s["task"]: None for s in samples if name in s["scores"]}
        aggregate = questions.aggregate(next(iter(tasks)), name)
        key = metric_name(name, config["dataset"]["name"], config)
        found[key] = float(aggregate(values))
        if (interval := _interval(values, aggregate, config)) is not None:
            found[f"{key}_low"], found[f"{key}_high"] = interval
        if len(tasks) == 1:
            continue
        for task in tasks:
            own = [s["scores"][name] for s in samples if s["task"] == task]
            found[metric_name(name, task, config)] = float(questions.aggregate(task, name)(own))
        each = [found[metric_name(name, task, config)] for task in tasks]
        found[f"{key}-by_task"] = mean(each)
    return found | _by_length(samples, config)


def _by_length(samples: Sequence[Sample], config: Any) -> dict[str, float]:
    """Return the headline metric by the length of the input, in LongBench-E's buckets of words."""
    if config["dataset"]["source"] == "generated" or any("length" not in s for s in samples):
        return {}
    metric, found = headline(samples, config), {}
    for low, high in zip(LENGTHS, (*LENGTHS[1:], None), strict=True):
        own = [
            s["scores"][metric]
            for s in samples
            if metric in s["scores"] and low <= s["length"] and (high is None or s["length"] < high)
        ]
        if own:
            end = f"{low // 1000}k-" + ("" if high is None else f"{high // 1000}k")
            found[metric_name(metric, f"{config['dataset']['name']}-{end}", config)] = mean(own)
    return found


def _interval(values: list[Any], aggregate: Any, config: Any) -> tuple[float, float] | None:
    """Return Wilson's interval of right and wrong answers, else one that resamples items."""
    measured = config["eval"]
    if set(values) <= {0.0, 1.0} if not isinstance(values[0], list) else False:
        return accuracy.wilson(int(sum(values)), len(values), measured["confidence"])
    return aggregate_interval(
        values, aggregate, resamples=measured["bootstrap_samples"],
        confidence=measured["confidence"], seed=config["seed"],
    )  # fmt: skip
