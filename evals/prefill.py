"""Exact prefills: computed once over mlx-lm's own caches, handed over to any method's fresh caches.

A prompt that runs over an exact cache and is compressed at once has the same K and V for every
method and setting, so a sweep computes it once (:class:`PrefillStore`) and compresses it k times.
Streaming prefill, where chunks see the compressed past, cannot be shared and is not here.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from evals.caches import Caches

_GIB = 1 << 30


@dataclass(frozen=True)
class PrefillState:
    """The exact caches after ``tokens`` tokens, 1 or more; users copy them, never append.

    ``given`` of them were there already when the rest was computed.
    """

    layers: list[Any]
    tokens: int
    given: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held."""
        return sum(layer.nbytes for layer in self.layers)


def evaluate(layers: Sequence[Any]) -> None:
    """Compute what the caches hold, and nothing else (the logits of a prefill never are)."""
    mx.eval([layer.state for layer in layers])


def exact_prefill(
    model: Any, tokens: list[int], chunk: int, prefix: PrefillState | None = None
) -> PrefillState:
    """Run ``tokens`` over the model's own exact caches, ``chunk`` tokens a call.

    With a ``prefix``, whose tokens ``tokens`` begin with, a copy of its caches takes the rest.
    """
    layers = copy.deepcopy(prefix.layers) if prefix else make_prompt_cache(model)
    for start in range(prefix.tokens if prefix else 0, len(tokens), chunk):
        model(mx.array(tokens[start : start + chunk])[None], cache=layers)
        evaluate(layers)
    return PrefillState(layers, len(tokens))


def hand_over(state: PrefillState, caches: Caches) -> None:
    """Give a prefill to fresh caches and compress it: one call a layer, then ``flush()``.

    A layer that the method does not cover (a sliding window) gets a copy of the exact cache: it
    cannot be filled by one call, and appending to the original would spoil it for the next method.
    """
    for index, exact in enumerate(state.layers):
        if index in caches.covered:
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
        self._spilled: dict[tuple[int, ...], Path] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all prefills held."""
        return sum(state.nbytes for state in self._states.values())

    def prefill(
        self, model: Any, tokens: list[int], chunk: int, shared: int = 0
    ) -> tuple[PrefillState, bool]:
        """Return the prefill of ``tokens`` and whether it was reused.

        The first ``shared`` tokens, which many prompts begin with, are a prefill of their own; the
        rest is computed on a copy of it. Chunk and ``shared`` are part of the key: they move the
        last digits, and a record must not depend on what ran before it. A prefill over the bound
        is returned but not kept.
        """
        if not 0 <= shared <= len(tokens):
            raise ValueError(
                f"shared={shared}: must be from 0 to the prompt's {len(tokens)} tokens; pass the "
                "length of the prefix that the prompts have in common."
            )
        if shared == len(tokens):  # the prefix itself
            shared = 0
        key = (chunk, shared, *tokens)
        reused = key in self._states or key in self._spilled
        state = self._held(key) if reused else self._computed(model, tokens, chunk, shared)
        self._keep(key, state)
        prefix = (chunk, 0, *tokens[:shared])
        if prefix in self._states:  # it is worth more than a prompt of its own
            self._states.move_to_end(prefix)
        while self.nbytes > self.max_bytes:
            self._put_out(*self._states.popitem(last=False))
        return state, reused

    def _held(self, key: tuple[int, ...]) -> PrefillState:
        """Take a prefill out of memory, or load it from disk."""
        if key in self._states:
            return self._states.pop(key)
        layers: Any = load_prompt_cache(str(self._spilled[key]))
        return PrefillState(layers, len(key) - 2)

    def _computed(self, model: Any, tokens: list[int], chunk: int, shared: int) -> PrefillState:
        """Compute a prefill, its first ``shared`` tokens through a prefill that is kept."""
        if not shared:
            return exact_prefill(model, tokens, chunk)
        prefix, reused = self.prefill(model, tokens[:shared], chunk)
        state = exact_prefill(model, tokens, chunk, prefix)
        return replace(state, given=shared) if reused else state

    def _keep(self, key: tuple[int, ...], state: PrefillState) -> None:
        """Take a prefill in as the newest; one that is too large pushes no other out."""
        if state.nbytes > self.max_bytes:
            self._put_out(key, state)
        else:
            self._states[key] = state

    def _put_out(self, key: tuple[int, ...], state: PrefillState) -> None:
        """Write a prefill that memory has no room for to disk, once, where that is asked for."""
        if self._folder is None or key in self._spilled:
            return
        path = self._folder / f"{len(self._spilled)}.safetensors"
        save_prompt_cache(str(path), state.layers)
        self._spilled[key] = path
