"""Greedy generation through a method's caches, several prompts decoded together.

Every prompt is prefilled and compressed alone, all but its last token, so its blocks are those it
would have in a batch of one. Then the caches of all rows become one batched cache a layer, and each
step feeds one token a row, the prompt's last one first. A row that is done leaves at once, and the
next prompt takes its place. A batch of one keeps the plain caches. No sampling.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from evals.caches import Caches
from evals.engine import Cost, Engine, Start, log_probs
from evals.tasks.costs import class_counts
from gear.exact import ExactCache


@dataclass(frozen=True)
class Generated:
    """One answer: ``text`` ends before the stop string or EOS, ``tokens`` with it.

    ``loglikelihood`` is that of all ``tokens``; ``stopped`` says what ended them: "string", "eos"
    or "length".
    """

    text: str
    tokens: list[int]
    loglikelihood: float
    stopped: str


class Ending:
    """What ends a generation: a stop string in its text, an EOS token, or ``max_new`` tokens.

    Errors: ``ValueError`` for ``max_new`` below 1.
    """

    def __init__(
        self, tokenizer: Any, until: Sequence[str], eos_ids: Sequence[int], max_new: int
    ) -> None:
        if max_new < 1:
            raise ValueError(f"max_new={max_new}: must be 1 or more tokens; raise max_gen_toks.")
        self._decode, self._eos_ids, self._max_new = tokenizer.decode, frozenset(eos_ids), max_new
        self._until = [string for string in until if string]
        # a stop string ends in the newest token, and no token that it spans is without a byte
        self._tail = 1 + max((len(string.encode()) for string in self._until), default=0)

    def reason(self, tokens: list[int]) -> str | None:
        """Return why ``tokens`` are the last, or None where more may come."""
        if tokens[-1] in self._eos_ids:
            return "eos"
        # a tail begins anywhere, so what is found in it is looked for in the whole text too
        texts = (self._decode(part) for part in (tokens[-self._tail :], tokens))
        if self._until and all(self._cut(text) is not None for text in texts):
            return "string"
        return "length" if len(tokens) >= self._max_new else None

    def text(self, tokens: list[int]) -> str:
        """Return the text of ``tokens`` before the EOS token and the first stop string."""
        text = self._decode(tokens[:-1] if tokens[-1] in self._eos_ids else tokens)
        return text[: self._cut(text)]

    def _cut(self, text: str) -> int | None:
        """Return where the first stop string begins."""
        return min((at for s in self._until if (at := text.find(s)) >= 0), default=None)


@dataclass
class _Row:
    """One prompt's generation on its way; ``score_s`` is its share of the steps' seconds."""

    index: int
    start: Start
    tokens: list[int] = field(default_factory=list)
    loglikelihood: float = 0.0
    score_s: float = 0.0

    @property
    def next(self) -> int:
        """Return the token to be fed."""
        return self.tokens[-1] if self.tokens else self.start.context[-1]


class _Batch:
    """The rows that are decoded together and their caches, one a layer.

    ``kinds`` are the classes that a row's caches had before they were merged.
    """

    def __init__(self, together: bool) -> None:
        self._together = together
        self.rows: list[_Row] = []
        self.layers: list[Any] = []
        self._kinds: list[type] = []

    def join(self, rows: list[_Row]) -> None:
        """Put rows behind those that are there."""
        plain = [row.start.caches.layers for row in rows]
        self.rows = self.rows + rows
        if not self._together:
            self.layers = plain[0]
            return
        self._kinds = [type(cache) for cache in plain[0]]
        new = [column[0].merge(list(column)) for column in zip(*plain, strict=True)]
        if self.layers:
            for old, more in zip(self.layers, new, strict=True):
                old.extend(more)
        else:
            self.layers = new
        for row in rows:  # the batch has its own copies
            row.start.caches.layers = []

    def left_by(self, index: int) -> Caches:
        """Return the caches that row ``index`` leaves, each of the class that it is now."""
        caches = self.rows[index].start.caches
        if not self._together:
            return caches
        layers = [layer.extract(index) for layer in self.layers]
        for i, (cache, kind) in enumerate(zip(layers, self._kinds, strict=True)):
            if kind is ExactCache and type(cache) is KVCache:  # all that mlx-lm's batch gives back
                layers[i] = ExactCache.from_state(cache.state)
        return Caches(layers, [i for i in caches.covered if hasattr(layers[i], "cache_bytes")])

    def keep(self, indices: list[int]) -> None:
        """Let all other rows go."""
        if self._together and indices:
            for layer in self.layers:
                layer.filter(indices)
        if not indices:
            self.layers = []
        self.rows = [self.rows[i] for i in indices]


def can_batch(caches: Caches) -> bool:
    """Say whether caches of different prompts can become one."""
    return all(hasattr(cache, "merge") for cache in caches.layers)


def generations(
    engine: Engine, prompts: Sequence[list[int]], ending: Ending, batch_size: int, shared: int = 0
) -> Iterator[tuple[int, Generated, Cost]]:
    """Yield each prompt's number, answer and cost as it is done; no prompt is empty.

    ``kv`` of the cost is the row's own after a flush; ``score_s`` shares a step's seconds equally
    among its rows, so sums over rows are wall time; ``peak_bytes`` has in it the rows that came
    later and ran beside.
    """
    waiting = list(enumerate(prompts))[::-1]
    batch = _Batch(together=batch_size > 1)
    while waiting or batch.rows:
        free = min(batch_size - len(batch.rows), len(waiting))
        if free:
            taken = [waiting.pop() for _ in range(free)]
            batch.join([_Row(index, engine.start(prompt, shared)) for index, prompt in taken])
        _step(engine.model, batch)
        going_on = []
        for i, row in enumerate(batch.rows):
            if (stopped := ending.reason(row.tokens)) is None:
                going_on.append(i)
                continue
            caches = batch.left_by(i)
            caches.flush()
            fed = len(row.tokens)
            kv, classes = caches.bytes(), class_counts(caches)
            cost = engine.cost(row.start, kv, classes, fed, fed, row.score_s)
            answer = ending.text(row.tokens), row.tokens, row.loglikelihood, stopped
            yield row.index, Generated(*answer), cost
        if len(going_on) < len(batch.rows):
            batch.keep(going_on)


def _step(model: Any, batch: _Batch) -> None:
    """Feed one token of every row, and append the likeliest next one to each."""
    began = time.perf_counter()
    with ExitStack() as stack:
        for row in batch.rows:
            stack.enter_context(row.start.meter.phase("score"))
        tokens = mx.array([[row.next] for row in batch.rows])
        logits = model(tokens, cache=batch.layers)[:, -1]
        chosen = mx.argmax(logits, axis=-1, keepdims=True)
        picked = log_probs(logits, chosen)
        mx.eval(chosen, picked)
    share = (time.perf_counter() - began) / len(batch.rows)
    said: Any = chosen[:, 0].tolist()
    nats: Any = picked[:, 0].tolist()
    for row, token, log_prob in zip(batch.rows, said, nats, strict=True):
        row.tokens.append(token)
        row.loglikelihood += log_prob
        row.score_s += share
