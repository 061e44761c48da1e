"""Filler: whole sentences, cut to a length whatever the tokenizer, and draws that repeat."""

from __future__ import annotations

import re
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from evals.haystack import GRASS, Draws, Filler, fit, real_sentences, real_text
from evals.tiny import ByteTokenizer

GRASS_TEXT = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
BYTES = ByteTokenizer()


def test_draws_repeat_and_spread() -> None:
    draws, same = Draws("a", 1, None), Draws("a", 1, None)
    numbers = [draws.below(10) for _ in range(2000)]
    assert numbers == [same.below(10) for _ in range(2000)]
    assert all(140 < n < 260 for n in Counter(numbers).values())
    assert Draws("a", 1, None).shuffled(range(50)) != list(range(50))
    assert sorted(Draws("a").shuffled(range(50))) == list(range(50))
    assert len(set(Draws("b").words(20, "abc", 3))) == 20


def test_filler_is_cut_at_the_nearest_sentence() -> None:
    filler = Filler(GRASS, BYTES)  # 20, 17, 19, 12 and 22 bytes with the blank before them
    assert filler.take(0, 90) == [0, 1, 2, 3, 4]
    assert filler.take(3, 60) == [3, 4, 0]
    assert filler.take(0, 11) == []
    assert filler.split([0, 1, 2, 3, 4], 0.0) == ("", GRASS_TEXT)
    assert filler.split([0, 1, 2, 3, 4], 1.0) == (GRASS_TEXT, "")
    before, behind = filler.split([0, 1, 2, 3, 4], 0.4)
    assert before == "The grass is green. The sky is blue."
    assert f"{before} {behind}" == GRASS_TEXT


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(0, 60),
    st.integers(1, 3000),
    st.floats(0.3, 3.0),
)
@settings(max_examples=60)
def test_a_fit_is_never_too_long_whatever_a_tokenizer_does(
    sizes: list[int], fixed: int, length: int, factor: float
) -> None:
    """Here a prompt has `factor` times the tokens that its sentences have one by one."""
    filler = Filler(["x" * (n - 1) for n in sizes], BYTES)

    def build(taken: list[int]) -> str:
        return "f" * fixed + "".join(" " + "x" * (sizes[at] - 1) for at in taken)

    def count(text: str) -> int:
        return fixed + int(factor * (len(text) - fixed))

    prompt, tokens = fit(length, count, lambda budget: filler.take(0, budget), build)
    if prompt is None:
        assert fixed + int(factor * min(sizes)) > length or tokens == fixed
        return
    assert count(prompt) == tokens <= length
    assert length - tokens <= factor * (max(sizes) + 2) + 2


def test_real_text_repeats_only_when_all_of_it_is_used() -> None:
    filler = Filler(real_sentences(), BYTES)
    size = sum(filler.sizes)
    taken = filler.take(3000, size - 20_000)
    assert len(set(taken)) == len(taken)
    assert max(Counter(filler.take(3000, 2 * size)).values()) == 2


def test_sentences_are_the_text_and_do_not_end_behind_titles() -> None:
    assert " ".join(real_sentences()) == real_text()
    assert "\n" not in real_text()
    ends = re.compile(r"\b(Mr|Mrs|Dr|St|Rep|U\.S|[A-Z])\.$")
    assert not [s for s in real_sentences() if ends.search(s)]
    assert 4000 < len(real_sentences()) < 6000
