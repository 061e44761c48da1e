"""Questions: lm-eval's prompts, filters and metrics as they are, and the generators' prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evals.data_files import DataError
from evals.items import Item, load_items, make_tasks
from evals.questions import RetrievalQuestions, TaskQuestions
from evals.schema import DatasetConfig
from evals.task_metrics import quality_metrics

FIXTURES = Path(__file__).parent / "fixtures"


def source(name: str, **options: Any) -> tuple[list[Item], TaskQuestions]:
    path = str(FIXTURES / f"{name}.jsonl")
    cfg = DatasetConfig(name=name, source="file", task=name, path=path, limit=4)
    items = load_items(cfg, seed=0)
    return items.scored, TaskQuestions(make_tasks(cfg, items), items.scored, **options)


def test_a_generation_is_read_by_every_filter() -> None:
    items, questions = source("gsm8k_cot")
    asked = questions.question(items[0])
    assert asked.until == ("Q:", "</s>", "<|im_end|>")
    assert asked.max_new == 256
    assert asked.text.count("\nA:") == 9  # 8 exemplars and the item
    assert asked.text.endswith(f"Q: {items[0].row['question']}\nA:")
    answer = items[0].row["answer"].split("####")[-1].strip()
    scores, read = questions.scores(items[0], [f" So it is {answer}. The answer is {answer}."])
    assert set(scores.values()) == {1.0}
    assert set(read) == {"strict-match", "flexible-extract", "last-number"}
    scores, read = questions.scores(items[0], [f" It is {answer}, of course"])
    assert scores["exact_match,strict-match"] == 0
    assert scores["exact_match,last-number"] == 1
    assert read["last-number"] == answer


def test_choices_are_pairs_and_the_best_one_is_the_answer() -> None:
    items, questions = source("truthfulqa_mc1")
    asked = questions.question(items[1])
    assert len({context for context, _ in asked.pairs}) == 1
    assert not asked.text
    worst = [(-5.0 - i, False) for i in range(len(asked.pairs))]
    assert questions.scores(items[1], worst)[0]["acc"] == 1  # mc1: the first is the right one
    assert questions.scores(items[1], worst[::-1])[0]["acc"] == 0


def test_a_chat_template_renders_every_example_as_a_turn() -> None:
    seen = []

    def render(messages: list[dict[str, str]], **options: Any) -> str:
        seen.append((messages, options))
        return "rendered"

    items, questions = source("gsm8k_cot", render=render, system_prompt="Be brief.")
    assert questions.question(items[0]).text == "rendered"
    messages, options = seen[0]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert len(messages) == 1 + 2 * 8 + 1
    assert options == {"add_generation_prompt": True}


def test_a_task_that_samples_is_refused() -> None:
    items, questions = source("gsm8k_cot")
    questions._tasks["gsm8k_cot"].config.generation_kwargs["do_sample"] = True
    with pytest.raises(DataError, match=r"dataset.task='gsm8k_cot': asks for sampling"):
        questions.question(items[0])


def test_a_generated_prompt_as_it_is_and_in_a_chat() -> None:
    row = {
        "prompt": "Find the key. It is 12345. What is it? The key is", "prefix": "The key is",
        "until": [], "max_new": 16, "answers": ["12345"], "task": "passkey",
    }  # fmt: skip
    item = Item("passkey-0", "passkey", 0, row)
    assert RetrievalQuestions().question(item).text == row["prompt"]
    plain = RetrievalQuestions(system_prompt="Be brief.").question(item).text
    assert plain == "Be brief.\n\n" + row["prompt"]
    chat = RetrievalQuestions(lambda said: "|".join(m["content"] for m in said) + ">", "Be brief.")
    text = chat.question(item).text
    assert text == "Be brief.|Find the key. It is 12345. What is it?>The key is"
    assert chat.scores(item, [" 12345."])[0] == {"acc": 1.0, "recall": 1.0}


def test_a_group_counts_items_and_subtasks_alike_and_buckets_lengths() -> None:
    class Means:
        def aggregate(self, task: str, metric: str) -> Any:
            return lambda values: sum(values) / len(values)

    config = {
        "dataset": {"name": "longbench", "metric": "score", "source": "hub"},
        "eval": {"confidence": 0.95, "bootstrap_samples": 20, "prefill": "exact"}, "seed": 0,
    }  # fmt: skip
    samples = [
        {"task": task, "scores": {"score": score}, "length": length}
        for task, score, length in [("a", 1, 100), ("a", 1, 5000), ("a", 1, 9000), ("b", 0, 3999)]
    ]
    found = quality_metrics(samples, Means(), config)  # pyright: ignore[reportArgumentType]
    assert found["quality/score/longbench"] == 0.75
    assert found["quality/score/longbench-by_task"] == 0.5
    assert (found["quality/score/a"], found["quality/score/b"]) == (1, 0)
    buckets = [found[f"quality/score/longbench-{end}"] for end in ("0k-4k", "4k-8k", "8k-")]
    assert buckets == [0.5, 1, 1]
