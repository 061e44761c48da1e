"""Windows of P+T+1 tokens from a document, and what the scored part of one says.

The first P tokens of a window are prefill, the next T are fed, and each of those predicts its
successor (the target). Window i covers the tokens from i·(P+T+1), so windows never overlap and
start at the document's start. No BOS is added. No MLX: tokens are lists of ints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from evals.data import DataError, Document


class Tokenizer(Protocol):
    """The part of a tokenizer that is needed here; no special tokens are added."""

    def encode(self, text: str, /) -> list[int]:
        """Return the token ids of `text`."""
        ...

    def decode(self, ids: list[int], /) -> str:
        """Return the text of `ids`; bytes that are no whole character become U+FFFD."""
        ...


@dataclass(frozen=True)
class Window:
    """P prefill tokens, T fed tokens and the T targets that they predict."""

    document: str
    """Id of the document."""
    index: int
    """Number of the window in its document, from 0."""
    start: int
    """Position in the document of the window's first token."""
    prefill: list[int]
    fed: list[int]
    targets: list[int]
    """targets[j] follows fed[j] in the text."""


def windows(
    tokens: Sequence[int],
    prefill: int,
    scored: int,
    per_document: int | None = None,
    document: str = "",
) -> list[Window]:
    """Return the windows of one document from its start, at most `per_document`; [] if none fits.

    Raises:
        DataError: prefill < 0, scored < 1 or per_document < 1.
    """
    for name, value, least in (
        ("eval.prefill_tokens", prefill, 0),
        ("eval.scored_tokens", scored, 1),
        ("dataset.windows_per_document", per_document, 1),
    ):
        if value is not None and value < least:
            raise DataError(
                f"{name}={value}: allowed are whole numbers from {least}. Next step: raise it."
            )
    size = prefill + scored + 1
    count = len(tokens) // size
    if per_document is not None:
        count = min(count, per_document)
    found = []
    for index in range(count):
        start = index * size
        window = list(tokens[start : start + size])
        found.append(
            Window(document, index, start, window[:prefill], window[prefill:-1], window[-scored:])
        )
    return found


def windows_of(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    prefill: int,
    scored: int,
    per_document: int | None = None,
) -> tuple[list[Window], list[str]]:
    """Return the windows of all documents in order, and the ids of the documents too short for one.

    Raises:
        DataError: no document holds a window (names every length and P+T+1), or a bad number.
    """
    found: list[Window] = []
    short: dict[str, int] = {}
    for document in documents:
        tokens = tokenizer.encode(document.text)
        own = windows(tokens, prefill, scored, per_document, document.id)
        found += own
        if not own:
            short[document.id] = len(tokens)
    if not found:
        size = prefill + scored + 1
        listed = ", ".join(f"{name}: {length}" for name, length in list(short.items())[:20])
        more = f" and {len(short) - 20} more" if len(short) > 20 else ""
        longest = max(short.values(), default=0)
        raise DataError(
            f"no document holds one window of eval.prefill_tokens + eval.scored_tokens + 1 = "
            f"{prefill} + {scored} + 1 = {size} tokens; tokens per document: {listed}{more}. "
            f"Allowed: a sum of at most {longest}. Next step: lower eval.prefill_tokens or "
            "eval.scored_tokens, use a longer text, or dataset.join_documents=true."
        )
    return found, list(short)


def spans(tokenizer: Tokenizer, window: Window) -> tuple[int, int]:
    """Return the words and UTF-8 bytes of the window's targets; for word perplexity and bits/byte.

    The targets are decoded *behind their window*, never alone: alone, a tokenizer may drop a
    leading space, and a target may start in the middle of a character. Only tokens and
    tokenizer enter, so all methods under test share the counts.
    """
    head = [*window.prefill, window.fed[0]]
    return span_counts(tokenizer.decode(head), tokenizer.decode([*head, *window.targets]))


def span_counts(head: str, full: str) -> tuple[int, int]:
    """Return the words and UTF-8 bytes that `full` has beyond its beginning `head`.

    A word (between whitespace) counts where it starts, and a character where its last byte is.
    So a text cut into spans, in the middle of words or characters too, keeps its totals.
    An unfinished character shows as U+FFFD at the end of a decoded text and is left out.
    """
    full = full.rstrip("\ufffd")
    shared = min(len(head), len(full))
    cut = next((at for at in range(shared) if head[at] != full[at]), shared)
    return len(full.split()) - len(full[:cut].split()), len(full[cut:].encode())
