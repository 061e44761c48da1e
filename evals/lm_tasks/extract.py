"""Answers out of generated text: the last number, and the last letter that reads as a choice.

Each is a filter of lm-eval: (responses of each item, items) to the extracted strings in the same
order, with `INVALID` where a text holds no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any

INVALID = "[invalid]"

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus belongs to the number unless something stands before it that it is subtracted from; a
# digit inside a word or behind a decimal point does not begin a number.
_NUMBER = re.compile(rf"((?<![\w)\]}}])-)?\$?(?<![A-Za-z_\d])(?<!\d\.)({_DIGITS})")
_TYPESET = str.maketrans("\N{MINUS SIGN}\N{EN DASH}\N{NO-BREAK SPACE}", "-- ")

_OPEN, _CLOSE = r"[*_$\s]*(?:\\boxed\{|\\text\{|\\mathrm\{|\(|\{)+\s*", r"\s*[)}]"
# In brackets either case; bare only where it cannot be the article or a variable in a sentence.
_CAPITAL, _SMALL = r"[*_$\s]*([A-E])(?![\w'])", r"[*_$\s]*([a-e])(?=[*_$]*[.,;:)]|\s*$)"
_CHOICE = rf"(?:{_OPEN}([A-Ea-e]){_CLOSE}|{_CAPITAL}|{_SMALL})"
_STATED = re.compile(
    r"(?i:answer|option|choice)(?i:\s+(?:is|would be|must be|should be))?\s*[:=]?"
    rf"(?i:\s*(?:option|choice))?{_CHOICE}",
    re.MULTILINE,
)
_BRACKETED = re.compile(rf"{_OPEN}([A-Ea-e]){_CLOSE}")
_BARE = re.compile(r"(?<![\w'(])(?:([B-E])(?![\w'])|(A)(?=[).:]|\s*$))", re.MULTILINE)


def number(text: str) -> str:
    """Return the last number of `text` in its shortest decimal form ("1,234.50" is "1234.5")."""
    plain = text.translate(_TYPESET).replace("{,}", ",").replace("\\,", ",").replace("\\$", "$")
    found = _NUMBER.findall(plain)
    if not found:
        return INVALID
    sign, digits = found[-1]
    value = Decimal(sign + digits.replace(",", ""))
    return "0" if value == 0 else format(value.normalize(), "f")


def letter(text: str) -> str:
    """Return the choice that `text` ends on, "a" to "e".

    The last stated answer ("the answer is (b)", "Answer: B") counts before the last letter in
    brackets or a box, and that before the last bare capital.
    """
    for pattern in (_STATED, _BRACKETED, _BARE):
        if found := pattern.findall(text):
            groups = found[-1] if isinstance(found[-1], tuple) else (found[-1],)
            return next(group for group in groups if group).lower()
    return INVALID


def _each(extract: Callable[[str], str], responses: Iterable[Sequence[str]]) -> list[list[str]]:
    return [[extract(text) for text in texts] for texts in responses]


def last_number(responses: Iterable[Sequence[str]], docs: Sequence[Any]) -> list[list[str]]:
    """Filter: :func:`number` of every response."""
    return _each(number, responses)


def last_letter(responses: Iterable[Sequence[str]], docs: Sequence[Any]) -> list[list[str]]:
    """Filter: :func:`letter` of every response."""
    return _each(letter, responses)
