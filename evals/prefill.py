"""Exact prefills: computed once over mlx-lm's own caches, handed over to any method's fresh caches.

A prompt that runs over an exact cache and is compressed at once has the same K and V for every
method and setting, so a sweep computes it once (:class:`PrefillStore`) and compresses it k times.
Streaming prefill, where chunks see the compressed past, cannot be shared and is not here.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from evals.caches import Caches
from gear.queries import watched

_GIB = 1 << 30


@dataclass(frozen=True)
class PrefillState:
    """The exact caches after ``tokens`` tokens, 1 or more; users copy them, never append.

    ``given`` of them were there already when the rest was computed.
    """

    layers: list[Any]
    tokens: int
    given: int = 0
    window: int = 0
    queries: dict[int, mx.array] = field(default_factory=dict)
    """By layer the last ``window`` queries, where a method asked for them (gear/queries.py)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held."""
        queries = sum(a.nbytes for a in self.queries.values())
        return queries + sum(layer.nbytes for layer in self.layers)


def evaluate(layers: Sequence[Any]) -> None:
    """Compute what the caches hold, and nothing else (the logits of a prefill never are)."""
    mx.eval([layer.state for layer in layers])


def exact_prefill(
    model: Any, tokens: list[int], chunk: int, prefix: PrefillState | None = None, window: int = 0
) -> PrefillState:
    """Run ``tokens`` over the model's own exact caches, ``chunk`` tokens a call.

    With a ``prefix``, whose tokens ``tokens`` begin with, a copy of its caches takes the rest. The
    last ``window`` queries of each layer are kept beside; they change nothing else.
    """
    layers = copy.deepcopy(prefix.layers) if prefix else make_prompt_cache(model)
    earlier = prefix.queries if prefix else {}
    with watched(model, layers, window, earlier) as (caches, last):
        for start in range(prefix.tokens if prefix else 0, len(tokens), chunk):
            model(mx.array(tokens[start : start + chunk])[None], cache=caches)
            evaluate(caches)
            mx.eval([q.array for q in last.values()])
    queries = {i: q.array for i, q in last.items() if q.array is not None}
    return PrefillState(layers, len(tokens), window=window, queries=queries)


def hand_over(state: PrefillState, caches: Caches) -> None:
    """Give a prefill to fresh caches and compress it: one call a layer, then ``flush()``.

    A layer that the method does not cover (a sliding window) gets a copy of the exact cache: it
    cannot be filled by one call, and appending to the original would spoil it for the next method.
    """
    for index, exact in enumerate(state.layers):
        if index in caches.covered:
            if caches.query_window and index in state.queries:
                caches.layers[index].observe(state.queries[index])
            caches.layers[index].update_and_fetch(*exact.keys_and_values())
        else:
            caches.layers[index] = copy.deepcopy(exact)
    caches.flush()
    evaluate(caches.layers)


class PrefillStore:
    """Exact prefills of one model, least recently used out beyond ``memory_gib``.

    Those that go out are kept in the folder ``spill``, if one is given, and come back as they were.
    """

    def __init__(self, memory_gib: float = 2.0, spill: Path | None = None) -> None:
        self.max_bytes = int(memory_gib * _GIB)
        self._states: OrderedDict[tuple[int, ...], PrefillState] = OrderedDict()
        self._folder = spill
        self._spilled: dict[tuple[int, ...], tuple[Path, int]] = {}  # with the queries' window

    @property
    def nbytes(self) -> int:
        """Bytes of all prefills held."""
        return sum(state.nbytes for state in self._states.values())

    def prefill(
        self, model: Any, tokens: list[int], chunk: int, shared: int = 0, window: int = 0
    ) -> tuple[PrefillState, bool]:
        """Return the prefill of ``tokens`` and whether it was reused.

        The first ``shared`` tokens, which many prompts begin with, are a prefill of their own; the
        rest is computed on a copy of it. Chunk and ``shared`` are part of the key: they move the
        last digits, and a record must not depend on what ran before it. One without the last
        ``window`` queries that are asked for is computed again. A prefill over the bound is
        returned but not kept.
        """
        if not 0 <= shared <= len(tokens):
            raise ValueError(
                f"shared={shared}: must be from 0 to the prompt's {len(tokens)} tokens; pass the "
                "length of the prefix that the prompts have in common."
            )
        if shared == len(tokens):  # the prefix itself
            shared = 0
        key = (chunk, shared, *tokens)
        state = self._held(key)
        reused = state is not None and state.window >= window
        if state is None or not reused:
            state = self._computed(model, tokens, chunk, shared, window)
        self._keep(key, state)
        prefix = (chunk, 0, *tokens[:shared])
        if prefix in self._states:  # it is worth more than a prompt of its own
            self._states.move_to_end(prefix)
        while self.nbytes > self.max_bytes:
            self._put_out(*self._states.popitem(last=False))
        return state, reused

    def _held(self, key: tuple[int, ...]) -> PrefillState | None:
        """Take a prefill out of memory, or load it from disk; None where it is in neither."""
        if key in self._states:
            return self._states.pop(key)
        if key not in self._spilled:
            return None
        path, window = self._spilled[key]
        layers: Any = load_prompt_cache(str(path))
        held: Any = mx.load(str(_queries_beside(path))) if window else {}
        queries = {int(i): a for i, a in held.items()}
        return PrefillState(layers, len(key) - 2, window=window, queries=queries)

    def _computed(
        self, model: Any, tokens: list[int], chunk: int, shared: int, window: int
    ) -> PrefillState:
        """Compute a prefill, its first ``shared`` tokens through a prefill that is kept."""
        if not shared:
            return exact_prefill(model, tokens, chunk, window=window)
        prefix, reused = self.prefill(model, tokens[:shared], chunk, window=window)
        state = exact_prefill(model, tokens, chunk, prefix, window)
        return replace(state, given=shared) if reused else state

    def _keep(self, key: tuple[int, ...], state: PrefillState) -> None:
        """Take a prefill in as the newest; one that is too large pushes no other out."""
        if state.nbytes > self.max_bytes:
            self._put_out(key, state)
        else:
            self._states[key] = state

    def _put_out(self, key: tuple[int, ...], state: PrefillState) -> None:
        """Write a prefill that memory has no room for to disk, once, where that is asked for."""
        if self._folder is None:
            return
        new = self._folder / f"{len(self._spilled)}.safetensors", -1
        path, window = self._spilled.get(key, new)
        if state.window <= window:
            return
        if window < 0:
            save_prompt_cache(str(path), state.layers)
        if state.window:
            queries = {str(i): a for i, a in state.queries.items()}
            mx.save_safetensors(str(_queries_beside(path)), queries)
        self._spilled[key] = path, state.window


def _queries_beside(path: Path) -> Path:
    """Return the file of a spilled prefill's queries."""
    return path.with_suffix(".queries.safetensors")
