"""Downstream tasks: every item of a task asked through the method's caches, and compared with fp16.

The context without its last token is prefilled and compressed, that token is fed in front of every
choice or generation, so each scored token sees the compressed cache (evals/lm.py). What was read
from each answer stands in its sample, with the text: scripts/rescore.py reads it again without the
model. A run that was killed goes on behind its last whole sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from statistics import mean
from typing import Any

import mlx.core as mx

from evals.engine import log_probs
from evals.items import Item
from evals.lm import CacheLM, Generated
from evals.questions import Question
from evals.task_metrics import task_metrics
from evals.tasks.base import TaskContext
from evals.tasks.costs import Sample, cost_metrics, merged_costs
from evals.tasks.fidelity import floats

_SHORTEST_PREFIX = 32  # tokens that prompts must share for a prefill of their own
_LONGEST_PASS = 2048  # tokens of the plain pass, whose logits are all held at once


class Downstream:
    """``eval=downstream``."""

    def resumable(self, samples: Sequence[Sample], ctx: TaskContext) -> Sequence[Sample]:
        """Return the samples of the batches that were finished: a batch is answered as a whole."""
        kept = 0
        for batch in _Walk(ctx).batches(ctx.items.scored):
            ids = [item.id for item in batch]
            if [sample.get("id") for sample in samples[kept : kept + len(batch)]] != ids:
                break
            kept += len(batch)
        return samples[:kept]

    def samples(self, ctx: TaskContext) -> Iterator[Sample]:
        """Yield one sample an item: its scores, answer, share of compressed context and cost.

        The fp16 arm's first one also has ``oneshot_nll``, its first answer's mean NLL out of one
        plain pass, for the guard that calls and one pass agree.
        """
        yield from ctx.resumed
        done = len(ctx.resumed)
        walk = _Walk(ctx)
        tokens = 0
        for batch in walk.batches(ctx.items.scored[done:]):
            for sample in walk.answered(batch):
                if not done and ctx.is_exact:
                    sample |= walk.in_one_pass(batch[0], sample)
                done += 1
                tokens += sample["context_tokens"] + sample["tokens"]
                yield sample
                ctx.progress(done, len(ctx.items.scored), tokens)

    def metrics(self, samples: Sequence[Sample], ctx: TaskContext) -> dict[str, float]:
        """Return ``quality/*`` with intervals, ``fidelity/*`` against fp16, and the cost."""
        context = sum(s["context_tokens"] for s in samples)
        compressed = sum(s["context_compressed"] for s in samples)
        seconds = [s["seconds"] for s in samples]
        return {
            **task_metrics(samples, ctx.reference, ctx.questions, ctx.config),
            "data/items": len(samples),
            "data/items_total": ctx.items.total,
            "coverage/context_compressed": compressed / context,
            "speed/items_per_s": len(samples) / sum(seconds),
            **cost_metrics(samples),
        }


class _Walk:
    """Items become questions, questions answers, answers samples."""

    def __init__(self, ctx: TaskContext) -> None:
        self._ctx = ctx
        self._lm = CacheLM(
            ctx.model, ctx.tokenizer, ctx.make_caches, ctx.method, ctx.prefills,
            prefill_chunk=ctx.eval.prefill_chunk, batch_size=ctx.eval.batch_size,
            prefill=ctx.eval.prefill, add_bos=ctx.eval.add_bos,
        )  # fmt: skip

    def batches(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Yield items that are answered together: generations that end alike, others alone."""

        def alike(item: Item) -> Any:
            asked = self._question(item)
            return (asked.until, self._max_new(asked)) if asked.text else item.id

        for _, run in groupby(items, alike):
            same, size = list(run), self._ctx.eval.batch_size
            yield from (same[i : i + size] for i in range(0, len(same), size))

    def answered(self, batch: list[Item]) -> list[Sample]:
        """Return the samples of items that are answered together."""
        asked = self._question(batch[0])
        if asked.text and not asked.rolling:
            return self._generated(batch, asked)
        answer = self._rolled if asked.rolling else self._chosen
        return [answer(item, self._question(item)) for item in batch]

    def in_one_pass(self, item: Item, sample: Sample) -> Sample:
        """Return the mean NLL of a sample's first answer, as it was found and out of one pass.

        Nothing for a rolling text or a context too long for one pass.
        """
        asked = self._question(item)
        if asked.rolling:
            return {}
        if asked.pairs:
            context, answer = self._lm.encode_pair(*asked.pairs[0])
        else:
            context, answer = self._lm.tok_encode(asked.text), sample["token_ids"]
        if len(context) + len(answer) > _LONGEST_PASS:
            return {}
        tokens = mx.array([*context, *answer[:-1]])
        logits = self._ctx.model(tokens[None])[0, len(context) - 1 :]
        picked = log_probs(logits, mx.array(answer)[:, None])
        found = sample["loglikelihoods"][0]
        return {"nll": [-found / len(answer)], "oneshot_nll": -mean(floats(picked[:, 0]))}

    def _question(self, item: Item) -> Question:
        """Return what is asked for an item."""
        return self._ctx.questions.question(item)

    def _max_new(self, asked: Question) -> int:
        """Return the most tokens of an answer."""
        return self._ctx.eval.max_new_tokens or asked.max_new

    @cached_property
    def _shared(self) -> dict[str, list[int]]:
        """Return the tokens that all prompts of a task begin with, by task."""
        prompts: dict[str, list[list[int]]] = {}
        for item in self._ctx.items.scored:
            asked = self._question(item)
            texts = [asked.text] if asked.text else dict.fromkeys(c for c, _ in asked.pairs)
            if not asked.rolling:
                prompts.setdefault(item.task, []).extend(map(self._lm.tok_encode, texts))
        found = {task: _in_common(encoded) for task, encoded in prompts.items()}
        return {t: p for t, p in found.items() if len(p) >= _SHORTEST_PREFIX}

    def _shared_with(self, item: Item, context: list[int]) -> int:
        """Return how many tokens at the start of a context have a prefill of their own."""
        return len(_in_common([self._shared.get(item.task, []), context[:-1]]))

    def _chosen(self, item: Item, asked: Question) -> Sample:
        """Return the sample of an item whose answers are scored by log-likelihood."""
        encoded = [self._lm.encode_pair(*pair) for pair in asked.pairs]
        found: dict[int, Any] = {}
        costs = []
        for context in dict.fromkeys(tuple(context) for context, _ in encoded):
            mine = [i for i, (other, _) in enumerate(encoded) if tuple(other) == context]
            scored, cost = self._lm.score(
                list(context), [encoded[i][1] for i in mine],
                self._shared_with(item, list(context)),
            )  # fmt: skip
            found |= dict(zip(mine, scored, strict=True))
            costs.append(cost)
        answers = [found[i] for i in range(len(encoded))]
        return self._sample(
            item, [(a.loglikelihood, a.is_greedy) for a in answers], merged_costs(costs),
            loglikelihoods=[a.loglikelihood for a in answers],
            is_greedy=[a.is_greedy for a in answers],
        )  # fmt: skip

    def _rolled(self, item: Item, asked: Question) -> Sample:
        """Return the sample of an item whose whole text is scored: all of it becomes context."""
        nats, cost = self._lm.rolling(self._lm.tok_encode(asked.text))
        compressed = max(cost["context_compressed"], cost["kv"]["tokens_compressed_min"])
        cost |= {
            "context_tokens": cost["context_tokens"] + cost["tokens"],
            "context_compressed": compressed,
        }
        return self._sample(item, [nats], cost, loglikelihoods=[nats])

    def _generated(self, batch: list[Item], asked: Question) -> list[Sample]:
        """Return the samples of generations that are decoded together."""
        prompts = [self._lm.tok_encode(self._question(item).text) for item in batch]
        shared = min(self._shared_with(i, p) for i, p in zip(batch, prompts, strict=True))
        answers = self._lm.generate(prompts, list(asked.until), self._max_new(asked), shared)
        return [self._written(i, *a) for i, a in zip(batch, answers, strict=True)]

    def _written(self, item: Item, answer: Generated, cost: Sample) -> Sample:
        """Return the sample of one generation."""
        return self._sample(
            item, [answer.text], cost, text=answer.text, token_ids=answer.tokens,
            loglikelihoods=[answer.loglikelihood], stopped=answer.stopped,
        )  # fmt: skip

    def _sample(self, item: Item, responses: list[Any], cost: Sample, **answer: Any) -> Sample:
        """Return an item's sample; ``document`` and ``window`` name it in messages."""
        scores, read = self._ctx.questions.scores(item, responses)
        timing = cost["timing"]
        parts = (timing[name] or 0.0 for name in ("prefill_s", "compress_s", "score_s"))
        return {
            "id": item.id, "task": item.task, "index": item.index,
            "document": item.id, "window": 0,
            "scores": scores, "read": read, **answer, **cost, "seconds": sum(parts),
            **{n: item.row[n] for n in ("length", "depth", "answers") if n in item.row},
        }  # fmt: skip


def _in_common(prompts: Sequence[list[int]]) -> list[int]:
    """Return what all of ``prompts`` begin with; those that differ most tell."""
    first, last = min(prompts), max(prompts)
    differs = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(differs, len(first))]
