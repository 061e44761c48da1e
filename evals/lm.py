"""CacheLM: lm-evaluation-harness's model interface, every scored token through a method's caches.

A context *without its last token* is prefilled and compressed at once. Its last token is fed in
front of each continuation or generation, so the first scored token, too, sees compressed K and V
(most LAMBADA targets and all letter choices are one token). Continuations are fed as eval=decode
feeds (evals/tasks/scoring.py): in calls that end at block boundaries. No torch, no sampling, and
none of lm-eval's request cache, whose key holds neither model nor cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from evals.caches import Caches
from evals.engine import Cost, Engine, Scored
from evals.generation import Ending, Generated, can_batch, generations
from evals.lm_tokens import Tokens
from evals.prefill import PrefillStore
from evals.tasks.costs import merged_costs
from evals.tasks.scoring import Prefiller
from gear.methods import Method

__all__ = ["CacheLM", "Cost", "Generated", "Scored"]

UNKNOWN_MAX_LENGTH = 2048
"""Rolling windows' tokens where the model names no maximum, as in lm-evaluation-harness."""
_log = logging.getLogger(__name__)


class CacheLM(Tokens, TemplateLM):
    """A model with the fresh caches of ``method`` that ``make_caches`` gives, one set a context.

    ``tokenizer`` is what `evals.models.load` returns; ``batch_size`` the generations decoded
    together; ``prefill`` exact or streaming; ``add_bos`` puts BOS in front of every text (None: as
    the tokenizer does by itself).
    """

    max_gen_toks = 256

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        make_caches: Callable[[], Caches],
        method: Method,
        prefills: PrefillStore,
        *,
        prefill_chunk: int = 2048,
        batch_size: int = 1,
        prefill: str = "exact",
        add_bos: bool | None = None,
    ) -> None:
        super().__init__(tokenizer, add_bos)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be 1 or more; set eval.batch_size=1.")
        self.batch_size = batch_size
        self._engine = Engine(
            model, make_caches, method, Prefiller(model, prefills, prefill, prefill_chunk)
        )
        self._warned: set[str] = set()

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a context and of its continuation, split as lm-eval splits them.

        Spaces at the context's end go to the continuation; an empty context is the prefix token.
        """
        if context.strip():
            return self._encode_pair(context, continuation)
        tokens = self.tok_encode(context + continuation, add_special_tokens=False)
        prefix = self.prefix_token_id
        return (tokens[:1], tokens[1:]) if tokens[:1] == [prefix] else ([prefix], tokens)

    # -- through the cache -----------------------------------------------------------------

    def score(
        self, context: list[int], continuations: Sequence[list[int]], shared: int = 0
    ) -> tuple[list[Scored], Cost]:
        """Return what each continuation is worth behind ``context``, and what that cost.

        The first ``shared`` tokens of the context are prefilled once for all contexts that begin
        with them. A context too long for the model is cut on the left, for the longest
        continuation. Errors: ``ValueError`` for no continuation, an empty one, or one that the
        model's maximum length has no room for.
        """
        if not continuations or not all(continuations):
            raise ValueError(
                f"continuations={continuations!r}: must be one or more, of at least one token each;"
                " look for an empty choice in the task."
            )
        room = max(map(len, continuations)) - 1
        context, shared = self._fitted(context, room, shared)
        return self._engine.score(context, continuations, shared)

    def generate(
        self, prompts: Sequence[list[int]], until: Sequence[str], max_new: int, shared: int = 0
    ) -> list[tuple[Generated, Cost]]:
        """Return greedy answers in the order of ``prompts``, and what each cost.

        An answer ends at once where its text has one of the strings ``until`` (the text is cut
        before it), at the tokenizer's EOS, or after ``max_new`` tokens. ``batch_size`` prompts are
        decoded together, a new one in every place that becomes free (see evals/generation.py).
        Prompts too long for the model are cut on the left. Errors: ``ValueError`` for ``max_new``
        below 1 or beyond the model's maximum length.
        """
        ending = Ending(self.tokenizer, until, self.eos_ids, max_new)
        fitted = [self._fitted(prompt, max_new, shared) for prompt in prompts]
        shared = min((s for _, s in fitted), default=0)
        size = min(self.batch_size, len(prompts))
        if size > 1 and not can_batch(self._engine.make_caches()):
            self._warn_once(
                f"cache={self._engine.method.name}: its caches cannot be batched, so generations "
                f"run one at a time instead of {self.batch_size} together"
            )
            size = 1
        done = generations(self._engine, [prompt for prompt, _ in fitted], ending, size, shared)
        answers = {index: (answer, cost) for index, answer, cost in done}
        return [answers[i] for i in range(len(prompts))]

    def rolling(self, tokens: list[int], max_length: int | None = None) -> tuple[float, Cost]:
        """Return the log-likelihood of ``tokens`` over lm-eval's rolling windows, and its cost.

        Every token is scored once, in windows of ``max_length`` (None: the model's), the first
        behind the prefix token (BOS, else EOS) alone. Each window's context is compressed and its
        tokens go through the cache as they do in `score`: so the tokens of a full window see
        little that is compressed at first, and more as blocks form, while those of the last
        window have a long compressed context. Errors: ``ValueError`` for no token.
        """
        if not tokens:
            raise ValueError("tokens=[]: nothing to score; leave out documents without text.")
        length = max_length or self.max_length or UNKNOWN_MAX_LENGTH
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, length, 1)
        parts = [self.score(c, [scored]) for c, scored in map(make_disjoint_window, windows)]
        total = sum(scored[0].loglikelihood for scored, _ in parts)
        return total, merged_costs([cost for _, cost in parts])

    # -- what lm-evaluation-harness asks ---------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_options: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, greedy) of each (text, context, continuation)."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            fitted, _ = self._fitted(context, len(continuation) - 1, 0)
            groups.setdefault(tuple(fitted), []).append(i)
        found: dict[int, tuple[float, bool]] = {}
        for context, members in groups.items():
            scored, _ = self.score(list(context), [requests[i][2] for i in members])
            values = ((s.loglikelihood, s.is_greedy) for s in scored)
            found |= zip(members, values, strict=True)
        return [found[i] for i in range(len(requests))]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each request's whole text."""
        return [self.rolling(self.tok_encode(request.args[0]))[0] for request in requests]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy answer to each request's (prompt, options).

        Options: ``until``, ``max_gen_toks``. Errors: ``ValueError`` where sampling is asked for.
        """
        alike: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(self._limits(request.args[1]), []).append(i)
        texts: dict[int, str] = {}
        for (until, max_new), members in alike.items():
            prompts = [self.tok_encode(requests[i].args[0]) for i in members]
            answers = self.generate(prompts, until, max_new)
            texts |= {i: answer.text for i, (answer, _) in zip(members, answers, strict=True)}
        return [texts[i] for i in range(len(requests))]

    def _limits(self, options: dict[str, Any]) -> tuple[tuple[str, ...], int]:
        """Return the stop strings and the most tokens of a generation."""
        for name in ("do_sample", "temperature"):
            if options.get(name):
                raise ValueError(
                    f"{name}={options[name]!r}: only greedy decoding is there, because two caches "
                    "are compared on the same choices; set do_sample: false and temperature: 0.0."
                )
        until = options.get("until") or ()
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        given = [options[name] for name in names if options.get(name) is not None]
        return ((until,) if isinstance(until, str) else tuple(until)), int(
            given[0] if given else self.max_gen_toks
        )

    # -- the model's length ----------------------------------------------------------------

    @property
    def max_length(self) -> int | None:
        """Return the most tokens that the model was made for; None where it does not say."""
        args, name = getattr(self._engine.model, "args", None), "max_position_embeddings"
        inner = getattr(args, "text_config", None)
        return inner.get(name) if isinstance(inner, dict) else getattr(args, name, None)

    def _fitted(self, context: list[int], room: int, shared: int) -> tuple[list[int], int]:
        """Return a context that leaves ``room`` tokens of the model's length, and its prefix.

        What is too long loses its beginning, and with it the shared prefix.
        """
        context = context or [self.prefix_token_id]
        if self.max_length is None or len(context) + room <= self.max_length:
            return context, shared
        keep = self.max_length - room
        if keep < 1:
            raise ValueError(
                f"{room} tokens behind the context: the model's maximum length of "
                f"{self.max_length} leaves none for it; shorten the continuation or max_gen_toks."
            )
        self._warn_once(
            f"contexts are cut on the left where the model's maximum length of {self.max_length} "
            f"tokens is exceeded (first one: {len(context)} tokens and {room} behind them)"
        )
        return context[-keep:], 0

    def _warn_once(self, text: str) -> None:
        """Log a warning, the first time of its beginning."""
        if (kind := text.split()[0]) not in self._warned:
            self._warned.add(kind)
            _log.warning(text)
