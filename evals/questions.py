"""What is asked of the model for one item, and what its answer is worth. No MLX here.

Two sources have the same three methods: `TaskQuestions` for lm-evaluation-harness's tasks, whose
prompts, filters and metrics are used as they are, and `RetrievalQuestions` for the generators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Protocol

from evals import retrieval
from evals.data_files import DataError
from evals.items import Item

DEFAULT_MAX_NEW = 256
"""Tokens of a generation where the task names none, as in lm-evaluation-harness."""


@dataclass(frozen=True)
class Question:
    """``pairs`` (context, continuation) are scored by log-likelihood; else ``text`` is the prompt
    of a generation, or with ``rolling`` a whole text to be scored."""

    pairs: Sequence[tuple[str, str]] = ()
    text: str = ""
    rolling: bool = False
    until: tuple[str, ...] = ()
    max_new: int = DEFAULT_MAX_NEW


Scores = dict[str, Any]
"""Value by metric, e.g. ``exact_match,strict-match``; a few metrics have a list of two numbers."""
Aggregate = Callable[[Sequence[Any]], float]


class Questions(Protocol):
    """A source of questions."""

    def question(self, item: Item) -> Question:
        """Return what is asked for ``item``."""
        ...

    def scores(self, item: Item, responses: Sequence[Any]) -> tuple[Scores, dict[str, Any]]:
        """Return the scores of an item and what was read from its answer, by extraction.

        ``responses``: (log-likelihood, greedy) of every pair, or one generated text, or one
        log-likelihood of a rolling text.
        """
        ...

    def aggregate(self, task: str, metric: str) -> Aggregate:
        """Return how a metric's values of many items become one number."""
        ...


class TaskQuestions:
    """Questions of lm-evaluation-harness's tasks, by name.

    ``render`` turns chat messages into a prompt; None asks in plain text.
    """

    def __init__(
        self,
        tasks: Mapping[str, Any],
        items: Sequence[Item],
        render: Callable[..., str] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self._tasks, self._render, self._system = tasks, render, system_prompt
        self._docs: dict[str, Any] = {}
        self._made: dict[str, list[Any]] = {}
        for name, task in tasks.items():
            of_task = [item for item in items if item.task == name]
            docs = list(task.eval_docs)
            if len(docs) != len(of_task):
                raise DataError(
                    f"dataset.task={name!r}: its process_docs makes {len(docs)} documents of "
                    f"{len(of_task)} rows; expected one each. Next step: use another task."
                )
            self._docs |= {i.id: doc for i, doc in zip(of_task, docs, strict=True)}

    def question(self, item: Item) -> Question:
        """Return what the task asks for ``item``."""
        requests = self._requests(item)
        kind, first = requests[0].request_type, requests[0].args
        if kind == "loglikelihood":
            return Question(pairs=[request.args for request in requests])
        if kind == "loglikelihood_rolling":
            return Question(text=first[0], rolling=True)
        options = first[1]
        if options.get("do_sample", bool(options.get("temperature"))):
            raise DataError(
                f"dataset.task={item.task!r}: asks for sampling ({options}); only greedy "
                "decoding repeats. Next step: use a task with do_sample: false."
            )
        until = options.get("until") or []
        return Question(
            text=first[0],
            until=tuple([until] if isinstance(until, str) else until),
            max_new=options.get("max_gen_toks") or DEFAULT_MAX_NEW,
        )

    def scores(self, item: Item, responses: Sequence[Any]) -> tuple[Scores, dict[str, Any]]:
        """Return the task's own metrics, each behind each of its filters."""
        task, requests = self._tasks[item.task], self._requests(item)
        for request, response in zip(requests, responses, strict=True):
            request.resps, request.filtered_resps = [response], {}
        task._instances = requests  # what apply_filters reads
        task.apply_filters()
        found: Scores = {}
        read: dict[str, Any] = {}
        for name in requests[0].filtered_resps:
            results = [request.filtered_resps[name] for request in requests]
            ending = "" if name == "none" else f",{name}"
            values = task.process_results(self._docs[item.id], results)
            found |= {f"{metric}{ending}": _plain(value) for metric, value in values.items()}
            if requests[0].request_type == "generate_until":
                read[name] = _first(results[0])
        return found, read

    def aggregate(self, task: str, metric: str) -> Aggregate:
        """Return the task's own aggregation of a metric."""
        return self._tasks[task].aggregation()[metric.partition(",")[0]]

    def _requests(self, item: Item) -> list[Any]:
        """Return the task's requests for an item, in their order; made once, as it takes 20 ms."""
        if item.id in self._made:
            return self._made[item.id]
        task, doc = self._tasks[item.task], self._docs[item.id]
        chat = self._render is not None
        context = task.fewshot_context(
            doc,
            task.config.num_fewshot or 0,
            system_instruction=self._system,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            chat_template=self._render,
        )
        made = task.construct_requests(
            doc=doc, ctx=context, apply_chat_template=chat, metadata=(item.task, item.index, 1)
        )
        self._made[item.id] = made if isinstance(made, list) else [made]
        return self._made[item.id]


def _plain(value: Any) -> Any:
    """Return a metric's value as JSON holds it."""
    return [float(v) for v in value] if isinstance(value, tuple | list) else float(value)


def _first(response: Any) -> Any:
    """Return a filter's text: some filters keep a list of one."""
    return response[0] if isinstance(response, list) and len(response) == 1 else response


class RetrievalQuestions:
    """Questions of the generators: the prompt is the item's, the answer exact.

    With ``render`` the prompt is a user's message, and its last words begin the assistant's: a
    small model that is given all of it as the message loses passkeys with the exact cache already.
    """

    def __init__(
        self, render: Callable[..., str] | None = None, system_prompt: str | None = None
    ) -> None:
        self._render, self._system = render, system_prompt

    def question(self, item: Item) -> Question:
        """Return the item's prompt."""
        row, text = item.row, item.row["prompt"]
        if self._render is not None:
            said = [{"role": "system", "content": self._system}] if self._system else []
            said.append({"role": "user", "content": text.removesuffix(row["prefix"]).rstrip()})
            text = self._render(said) + row["prefix"]
        elif self._system:
            text = f"{self._system}\n\n{text}"
        return Question(text=text, until=tuple(row["until"]), max_new=row["max_new"])

    def scores(self, item: Item, responses: Sequence[Any]) -> tuple[Scores, dict[str, Any]]:
        """Return the exact scores of a generated text."""
        return dict(retrieval.score(item.row, responses[0])), {}

    def aggregate(self, task: str, metric: str) -> Aggregate:
        """Return the mean: every value is a share."""
        return mean
