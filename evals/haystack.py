"""Filler text for retrieval prompts, cut to a length in tokens, and draws that always repeat.

A prompt is fixed text around filler. `fit` finds how much filler brings it just below a length:
whole sentences are chosen by their sizes one by one, the prompt is measured as a whole, and the
difference goes into the next try. No MLX.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Protocol, TypeVar

from evals.data import TEXTS

T = TypeVar("T")

GRASS = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
"""The filler of Mohtashami and Jaggi (2023), which RULER uses too."""
CLOSE_TOKENS = 2
"""A prompt that is this near to its length is not improved further."""
_TRIES = 8
_LOOK_AHEAD = 500  # sentences that are passed over in search of one that still fits
_NO_END = re.compile(
    r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Jr|Sr|Lt|Col|Gen|Gov|Sen|Rep|No|vs)|\bU\.S|\b[ap]\.m)\.$"
)
_BETWEEN = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")


class Tokenizer(Protocol):
    """What is asked of a tokenizer; special tokens that it adds count as tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        ...


class Draws:
    """Random numbers that follow from ``key`` alone, on every machine and version (SHA-256)."""

    def __init__(self, *key: object) -> None:
        self._key = hashlib.sha256(repr(key).encode()).digest()
        self._count = 0

    def below(self, n: int) -> int:
        """Return a whole number from 0 to n - 1."""
        self._count += 1
        digest = hashlib.sha256(self._key + self._count.to_bytes(8, "big")).digest()
        return int.from_bytes(digest[:16], "big") % n  # 2**128: the bias is none

    def pick(self, items: Sequence[T]) -> T:
        """Return one of ``items``."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return ``items`` in random order."""
        found = list(items)
        for i in range(len(found) - 1, 0, -1):
            j = self.below(i + 1)
            found[i], found[j] = found[j], found[i]
        return found

    def words(self, count: int, letters: str, length: int) -> list[str]:
        """Return ``count`` different words of ``length`` random letters."""
        found: dict[str, None] = {}
        while len(found) < count:
            found["".join(self.pick(letters) for _ in range(length))] = None
        return list(found)


@cache
def real_text() -> str:
    """Return the embedded addresses as one line of text (evals/texts, public domain)."""
    files = sorted(TEXTS.glob("*.txt"))
    return " ".join(" ".join(file.read_text(encoding="utf-8").split()) for file in files)


@cache
def real_sentences() -> tuple[str, ...]:
    """Return the sentences of `real_text`; joined by blanks they are that text."""
    text, found, start = real_text(), [], 0
    for gap in _BETWEEN.finditer(text):
        end = gap.end() - len(gap[0]) + len(gap[0].rstrip())
        if not _NO_END.search(text, start, gap.start()):
            found.append(text[start:end])
            start = gap.end()
    return (*found, text[start:])


class Filler:
    """Sentences and how many tokens each one adds to a text it is joined to by a blank."""

    def __init__(self, sentences: Sequence[str], tokenizer: Tokenizer) -> None:
        none = len(tokenizer.encode(""))
        self.sentences = sentences
        self.sizes = [max(1, len(tokenizer.encode(f" {s}")) - none) for s in sentences]
        self._least = min(self.sizes)

    def take(self, start: int, budget: int) -> list[int]:
        """Return the numbers of the sentences from ``start`` on that fit into ``budget`` tokens.

        In their order, beginning again behind the last one. Where the next one is too long the
        nearest one after it that fits follows, until none does.
        """
        taken, number, passed = [], start, 0
        while budget >= self._least and passed < _LOOK_AHEAD:
            at = number % len(self.sentences)
            number, passed = number + 1, passed + 1
            if self.sizes[at] <= budget:
                taken.append(at)
                budget, passed = budget - self.sizes[at], 0
        return taken

    def split(self, taken: Sequence[int], depth: float) -> tuple[str, str]:
        """Return the text before and behind the sentence boundary nearest to ``depth``.

        ``depth`` is a share of the filler's tokens: 0 is before all of it, 1 behind it.
        """
        ends = [0, *accumulate(self.sizes[at] for at in taken)]
        cut = min(range(len(ends)), key=lambda i: abs(ends[i] - depth * ends[-1]))
        texts = [self.sentences[at] for at in taken]
        return " ".join(texts[:cut]), " ".join(texts[cut:])


def fit(
    length: int,
    count: Callable[[str], int],
    take: Callable[[int], T],
    build: Callable[[T], str],
) -> tuple[str | None, int]:
    """Return (the longest prompt of at most ``length`` tokens that was found, its tokens).

    ``take(budget)`` gives filler of about that many tokens, ``build`` the prompt with it. Where
    there is no room for any filler it is (None, the tokens of the prompt without filler).
    """
    bare = most = used = count(build(take(0)))
    best, budget, over, tries = None, length - bare, 100 * length, 0
    while budget > 0 and (tries < _TRIES or used > length):
        tries += 1
        prompt = build(take(budget))
        used = count(prompt)
        if most < used <= length:
            best, most = prompt, used
        if 0 <= length - used <= CLOSE_TOKENS:
            break
        over = min(over, budget) if used > length else over
        step = (length - used) * budget / max(1, used - bare)  # as what is there so far grew
        budget = min(budget + (math.floor(step) or 1), over - 1)
    return best, most
