"""evals.windows: which tokens are scored, and how many words and bytes they are."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from evals.data import DataError, Document
from evals.windows import Window, span_counts, spans, windows, windows_of


class ByteTokenizer:
    """One token a byte."""

    def encode(self, text: str, /) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], /) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class BpeTokenizer:
    """A trained byte-level BPE, as SmolLM2's and Llama-3's; a token is part of a word or of é."""

    def __init__(self, text: str) -> None:
        self.bpe = Tokenizer(models.BPE())
        self.bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, show_progress=False
        )
        self.bpe.train_from_iterator([text], trainer)

    def encode(self, text: str, /) -> list[int]:
        return self.bpe.encode(text).ids

    def decode(self, ids: list[int], /) -> str:
        return self.bpe.decode(ids)


TEXT = "The naïve café, déjà vu — über 世界 and 🎉 again.\n\nThe end of the naïve text.\n"


# --- windows ---


def test_window_is_prefill_fed_and_their_successors() -> None:
    first, second = windows(list(range(100, 115)), prefill=4, scored=2, document="d")
    assert first == Window("d", 0, 0, [100, 101, 102, 103], [104, 105], [105, 106])
    assert second == Window("d", 1, 7, [107, 108, 109, 110], [111, 112], [112, 113])


def test_each_target_follows_its_fed_token() -> None:
    tokens = list(range(50))
    for window in windows(tokens, 5, 7):
        assert window.fed[0] == tokens[window.start + 5]
        assert [token + 1 for token in window.fed] == window.targets
        assert window.prefill + window.fed == tokens[window.start : window.start + 12]


@pytest.mark.parametrize(
    ("length", "per_document", "count"),
    [
        (6, None, 0),
        (7, None, 1),
        (13, None, 1),
        (14, None, 2),
        (70, None, 10),
        (70, 3, 3),
        (7, 9, 1),
    ],
)
def test_number_of_windows(length: int, per_document: int | None, count: int) -> None:
    assert len(windows([0] * length, 4, 2, per_document)) == count


def test_without_prefill() -> None:
    assert windows([1, 2, 3], 0, 2) == [Window("", 0, 0, [], [1, 2], [2, 3])]


@pytest.mark.parametrize(
    ("prefill", "scored", "per_document", "says"),
    [
        (-1, 2, 1, r"eval\.prefill_tokens=-1: allowed are whole numbers from 0"),
        (4, 0, 1, r"eval\.scored_tokens=0: allowed are whole numbers from 1"),
        (4, 2, 0, r"dataset\.windows_per_document=0: allowed are whole numbers from 1"),
    ],
)
def test_bad_numbers(prefill: int, scored: int, per_document: int, says: str) -> None:
    with pytest.raises(DataError, match=says):
        windows([0] * 20, prefill, scored, per_document)


def test_documents_in_order_and_short_ones_named() -> None:
    documents = [Document("a", "x" * 14), Document("b", "y" * 6), Document("c", "z" * 7)]
    found, skipped = windows_of(documents, ByteTokenizer(), 4, 2)
    assert [(window.document, window.index) for window in found] == [("a", 0), ("a", 1), ("c", 0)]
    assert skipped == ["b"]


def test_no_document_holds_a_window() -> None:
    documents = [Document("a", "x" * 5), Document("b", "y" * 6)]
    with pytest.raises(DataError, match=r"4 \+ 2 \+ 1 = 7 tokens.*a: 5, b: 6\..*at most 6.*Next"):
        windows_of(documents, ByteTokenizer(), 4, 2)


# --- words and bytes of the scored span ---


@pytest.mark.parametrize(
    ("head", "full", "counts"),
    [
        ("one ", "one two three", (2, 9)),
        ("one", "one two three", (2, 10)),
        ("one tw", "one two three", (1, 7)),  # "two" started before the span
        ("one tw", "one two", (0, 1)),
        ("", "  one\n\ttwo ", (2, 11)),
        ("one", "one  \n", (0, 3)),
        ("na\ufffd", "naïve or", (1, 7)),  # ï ends in the span, so both bytes are its
        ("a ", "a na\ufffd", (1, 2)),  # and not the span's where it does not end
        ("na\ufffd", "na\ufffd", (0, 0)),
    ],
)
def test_span_counts(head: str, full: str, counts: tuple[int, int]) -> None:
    assert span_counts(head, full) == counts


def cut(text: str, cuts: list[int], tokenizer: ByteTokenizer) -> list[tuple[int, int]]:
    tokens = tokenizer.encode(text)
    places = sorted({0, len(tokens), *(place % (len(tokens) + 1) for place in cuts)})
    return [
        span_counts(tokenizer.decode(tokens[:start]), tokenizer.decode(tokens[:stop]))
        for start, stop in pairwise(places)
    ]


@given(
    st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])),
    st.lists(st.integers(0, 1000)),
)
def test_spans_of_a_text_add_up(text: str, cuts: list[int]) -> None:
    counts = cut(text, cuts, ByteTokenizer())
    assert sum(words for words, _ in counts) == len(text.split())
    assert sum(size for _, size in counts) == len(text.encode())


def test_byte_level_bpe_splits_words_and_characters() -> None:
    tokenizer = BpeTokenizer("The naïve end of the text. " * 5)
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    assert "\ufffd" in "".join(tokenizer.decode([token]) for token in tokens)
    for prefill in range(len(tokens) - 2):
        (window,) = windows(tokens, prefill, len(tokens) - prefill - 1)
        words, size = spans(tokenizer, window)
        # an independent count from the bytes: what whole characters the head does not hold
        head = b"".join(piece_bytes(tokenizer, token) for token in tokens[: prefill + 1])
        head_text = head.decode(errors="ignore")
        assert size == len(TEXT.encode()) - len(head_text.encode())
        assert words == len(TEXT.split()) - len(head_text.split())


def piece_bytes(tokenizer: BpeTokenizer, token: int) -> bytes:
    """Undo byte-level BPE's printable alphabet (bytes_to_unicode of GPT-2)."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in keep]
    table = {chr(byte): byte for byte in keep} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
    piece = tokenizer.bpe.id_to_token(token)
    assert piece is not None
    return bytes(table[sign] for sign in piece)


def test_leading_space_that_a_tokenizer_drops_is_counted() -> None:
    class Stripping(ByteTokenizer):
        """As SentencePiece: a decoded text never starts with a space."""

        def decode(self, ids: list[int], /) -> str:
            return super().decode(ids).removeprefix(" ")

    tokens = list(b" one two three")
    (window,) = windows(tokens, 3, 10)
    assert bytes(window.targets) == b" two three"
    assert spans(Stripping(), window) == (2, 10)
