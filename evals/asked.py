"""The items of a downstream job and the questions they make, from its spec. No MLX here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evals import retrieval
from evals.data_files import check_unchanged
from evals.items import Item, Items, load_items, make_tasks, narrow
from evals.lm_tokens import Tokens
from evals.questions import Questions, RetrievalQuestions, TaskQuestions
from evals.schema import DatasetConfig, EvalConfig


def asked(spec: Mapping[str, Any], tokenizer: Any) -> tuple[Items, Questions]:
    """Return what a job asks. DataError where the items are not those the key was made from."""
    dataset, seed = DatasetConfig(**spec["dataset"]), spec["config"]["seed"]
    measured = EvalConfig(**spec["config"]["eval"])
    tokens = Tokens(tokenizer, measured.add_bos)
    render = tokens.apply_chat_template if measured.chat_template else None
    if dataset.source == "generated":
        scored = retrieval.generate(dataset, tokenizer, seed)
        questions = RetrievalQuestions(render, measured.system_prompt)
        return Items(scored, {}, retrieval.total(dataset)), questions
    items = load_items(dataset, seed)
    check_unchanged(dataset.name, items.content_hash, spec["config"]["dataset"]["content_hash"])
    tasks = make_tasks(dataset, items)
    questions = TaskQuestions(tasks, items.scored, render, measured.system_prompt)

    def context_tokens(item: Item) -> int:
        question = questions.question(item)
        return len(tokens.tok_encode(question.text or question.pairs[0][0]))

    return narrow(items, dataset, seed, context_tokens), questions
