"""The four retrieval prompts, each out of random draws and filler up to a length in tokens.

- passkey: Mohtashami and Jaggi (2023, "Landmark Attention"): a five-digit key in grass-is-green.
- needle: one magic number of a drawn city between the sentences of real text (RULER's single NIAH).
- vartrack: RULER's variable tracking, one chain of four hops in grass-is-green, behind one worked
  example: every variable that holds the value.
- freqwords: RULER's frequent words extraction: coded words with counts like 1/rank^2 of which the
  first is "..."; the three most frequent of the others.

RULER is Hsieh et al. (2024). Its texts are kept but for one misspelling and blanks at the end.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evals.data_files import DataError
from evals.haystack import GRASS, Draws, Filler, Tokenizer, fit, real_sentences

Row = dict[str, Any]

VERSION = 1
"""Raise it when the same settings and seed give other prompts or answers."""

CITIES = (
    "Accra", "Adelaide", "Antwerp", "Bergen", "Bologna", "Bordeaux", "Brisbane", "Bristol",
    "Calgary", "Cardiff", "Cork", "Dakar", "Dresden", "Dublin", "Durban", "Edinburgh", "Florence",
    "Ghent", "Glasgow", "Gothenburg", "Granada", "Halifax", "Helsinki", "Jakarta", "Kyoto",
    "Lagos", "Lima", "Lisbon", "Lyon", "Malaga", "Marseille", "Montreal", "Nairobi", "Naples",
    "Osaka", "Oslo", "Ottawa", "Perth", "Prague", "Quito", "Reykjavik", "Riga", "Salzburg",
    "Santiago", "Seville", "Stockholm", "Sydney", "Tallinn", "Turin", "Utrecht", "Valencia",
    "Vienna", "Vilnius", "Wellington", "Zurich",
)  # fmt: skip
"""None of them is named in the real text."""

PASSKEY_TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there."
)
PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key."
PASSKEY_QUESTION = "What is the pass key?"
PASSKEY_PREFIX = "The pass key is"
NEEDLE_TASK = (
    "A special magic number is hidden within the following text. Make sure to memorize it."
    " I will quiz you about the number afterwards."
)
NEEDLE = "One of the special magic numbers for {city} is: {number}."
NEEDLE_QUESTION = "What is the special magic number for {city} mentioned in the provided text?"
NEEDLE_PREFIX = "The special magic number for {city} mentioned in the provided text is"
VARTRACK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text above."
)
VARTRACK_PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables"
    " are assigned the value {value}, they are:"
)
FREQWORDS = (
    "Read the following coded text and track the frequency of each coded word. Find the three most"
    " frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please"
    " ignore the dots '....'. What are the three most frequently appeared words in the above coded"
    " text?"
)
FREQWORDS_PREFIX = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
HOPS, VARIABLE_LETTERS, EXAMPLE_LETTERS = 4, 5, 3
WORD_LETTERS, ASKED_WORDS, ZETA_2 = 6, 3, 1.6449340668482264
NOISE_WORD = "..."


@dataclass(frozen=True)
class Texts:
    """A tokenizer, and the fillers measured with it."""

    tokenizer: Tokenizer

    def count(self, text: str) -> int:
        """Return the tokens of a text."""
        return len(self.tokenizer.encode(text))

    @cached_property
    def grass(self) -> Filler:
        """The grass-is-green filler."""
        return Filler(GRASS, self.tokenizer)

    @cached_property
    def real(self) -> Filler:
        """The sentences of the embedded addresses."""
        return Filler(real_sentences(), self.tokenizer)


def passkey(texts: Texts, length: int, depth: float | None, draws: Draws) -> Row:
    """Return the prompt that hides a five-digit key at ``depth`` of the filler."""
    key = str(10_000 + draws.below(90_000))

    def build(taken: list[int]) -> str:
        before, behind = texts.grass.split(taken, depth or 0.0)
        question = f"{PASSKEY_QUESTION} {PASSKEY_PREFIX}"
        parts = (PASSKEY_TASK, before, PASSKEY.format(key=key), behind, question)
        return "\n".join(part for part in parts if part)

    prompt = _fitted(texts, length, lambda budget: texts.grass.take(0, budget), build)
    return _row(prompt, PASSKEY_PREFIX, [key], 16)


def needle(texts: Texts, length: int, depth: float | None, draws: Draws) -> Row:
    """Return the prompt that hides a city's seven-digit number at ``depth`` of real text."""
    city, number = draws.pick(CITIES), str(1_000_000 + draws.below(9_000_000))
    start = draws.below(len(texts.real.sentences))
    hidden, prefix = NEEDLE.format(city=city, number=number), NEEDLE_PREFIX.format(city=city)
    question = f"{NEEDLE_QUESTION.format(city=city)} {prefix}"

    def build(taken: list[int]) -> str:
        before, behind = texts.real.split(taken, depth or 0.0)
        context = " ".join(part for part in (before, hidden, behind) if part)
        return "\n".join((NEEDLE_TASK, context, question))

    prompt = _fitted(texts, length, lambda budget: texts.real.take(start, budget), build)
    return _row(prompt, prefix, [number], 24)


def vartrack(texts: Texts, length: int, depth: float | None, draws: Draws) -> Row:
    """Return the prompt that scatters one chain of assignments over the whole filler."""
    example = _chain(draws, EXAMPLE_LETTERS)
    names, value = _chain(draws, VARIABLE_LETTERS)
    where = [draws.below(1 << 30) / (1 << 30) for _ in names]
    shown = _tracked(GRASS, *example, [i / len(names) for i in range(len(names))])
    shown = f"{shown} {' '.join(example[0])}\n\n\n"

    def build(taken: list[int]) -> str:
        return shown + _tracked([GRASS[at] for at in taken], names, value, where)

    prompt = _fitted(texts, length, lambda budget: texts.grass.take(0, budget), build)
    prefix = VARTRACK_PREFIX.format(count=len(names), value=value)
    return _row(prompt, prefix, names, 48)


def freqwords(texts: Texts, length: int, depth: float | None, draws: Draws) -> Row:
    """Return the prompt of coded words; the answers are sorted by falling frequency."""
    kinds = max(length // 50, ASKED_WORDS + 2)
    words = [NOISE_WORD, *draws.words(kinds - 1, string.ascii_lowercase, WORD_LETTERS)]
    sizes = [texts.count(f" {word}") - texts.count("") for word in words]
    order = draws.below(1 << 62)

    def take(budget: int) -> list[str]:
        fitting, too_many = 0, budget + 1
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            used = sum(n * size for n, size in zip(_counts(middle, kinds), sizes, strict=True))
            fitting, too_many = (middle, too_many) if used <= budget else (fitting, middle)
        counts = _counts(fitting, kinds)
        used = sum(n * size for n, size in zip(counts, sizes, strict=True))
        counts[0] += (budget - used) // sizes[0]  # what is left is noise
        return [word for word, n in zip(words, counts, strict=True) for _ in range(n)]

    def build(taken: list[str]) -> str:
        coded = " ".join(Draws(order).shuffled(taken))
        return f"{FREQWORDS.format(context=coded)} {FREQWORDS_PREFIX}"

    prompt = _fitted(texts, length, take, build)
    answers = words[1 : ASKED_WORDS + 1]
    if prompt.count(answers[-1]) <= prompt.count(words[ASKED_WORDS + 1]):
        raise DataError(
            f"dataset.lengths={length}: too short for words that differ in their frequency. "
            f"Next step: use {2 * length} or more."
        )
    return _row(prompt, FREQWORDS_PREFIX, answers, 48)


FORMS: dict[str, Callable[[Texts, int, float | None, Draws], Row]] = {
    "passkey": passkey,
    "needle": needle,
    "vartrack": vartrack,
    "freqwords": freqwords,
}
"""What writes the prompt of each task."""


def _row(prompt: str, prefix: str, answers: list[str], max_new: int) -> Row:
    """Return the fields of a row that the form decides.

    Nothing but ``max_new`` ends an answer, as in RULER: a chat may begin with an empty line.
    """
    return {
        "prompt": prompt, "prefix": prefix, "answers": answers, "max_new": max_new, "until": [],
    }  # fmt: skip


def _fitted(
    texts: Texts, length: int, take: Callable[[int], Any], build: Callable[[Any], str]
) -> str:
    """Return the longest prompt of at most ``length`` tokens; ``DataError`` without any filler."""
    prompt, tokens = fit(length, texts.count, take, build)
    if prompt is None:
        raise DataError(
            f"dataset.lengths={length}: the text around the filler alone takes {tokens} tokens of "
            f"this model's tokenizer. Next step: use {tokens + 100} or more."
        )
    return prompt


def _chain(draws: Draws, letters: int) -> tuple[list[str], str]:
    """Return the variables of a chain of assignments, and the value that all of them get."""
    names = draws.words(HOPS + 1, string.ascii_uppercase, letters)
    return names, str(10_000 + draws.below(90_000))


def _tracked(
    sentences: Sequence[str], names: Sequence[str], value: str, where: Sequence[float]
) -> str:
    """Return the prompt of one chain, its assignments at the shares ``where`` of the sentences."""
    values = [value, *(f"VAR {name}" for name in names[:-1])]
    assignments = [f"VAR {name} = {v}" for name, v in zip(names, values, strict=True)]
    placed, done = [], 0
    for share, assignment in zip(sorted(where), assignments, strict=True):
        until = max(int(share * len(sentences)), done + bool(placed))  # never side by side
        placed += [*sentences[done:until], assignment]
        done = until
    context = " ".join([*placed, *sentences[done:]])
    prefix = VARTRACK_PREFIX.format(count=len(names), value=value)
    return f"{VARTRACK.format(context=context, value=value)} {prefix}"


def _counts(words: int, kinds: int) -> list[int]:
    """Return how often each of ``kinds`` words appears among ``words``: as 1 / rank^2."""
    return [int(words / (rank * rank) / ZETA_2) for rank in range(1, kinds + 1)]
