"""Prompts that a template cannot say: AQuA's choices, HellaSwag's clean-up, WinoGrande's blank.

LAMBADA's are here because thousands are counted in tokens, and a template takes 2 ms.
"""

from __future__ import annotations

import re
from typing import Any

Row = dict[str, Any]


def aqua_question(row: Row) -> str:
    """Return Wei et al.'s prompt: "Q: ...", the choices as "(a) 21 (b) 22", and "A:"."""
    choices = []
    for option in row["options"]:
        name, _, text = option.partition(")")
        choices.append(f"({name.strip().lower()}) {text.strip()}")
    return f"Q: {row['question']}\nAnswer Choices: {' '.join(choices)}\nA:"


def _clean(text: str) -> str:
    """Remove the marks that HellaSwag kept from WikiHow, as lm-eval does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def hellaswag_context(row: Row) -> str:
    """Return "Activity: what happened so far", as lm-eval's `query`."""
    return _clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")


def hellaswag_endings(row: Row) -> list[str]:
    """Return the cleaned endings."""
    return [_clean(ending) for ending in row["endings"]]


def lambada_passage(row: Row) -> str:
    """Return the passage without its last word and the space in front of it."""
    return row["text"].rpartition(" ")[0]


def lambada_word(row: Row) -> str:
    """Return the last word behind a space."""
    return f" {row['text'].rpartition(' ')[2]}"


def winogrande_answer(row: Row) -> int:
    """Return the index of the right filler: lm-eval scores contexts, so this is its "text"."""
    return {"1": 0, "2": 1}[row["answer"]]


def winogrande_rest(row: Row) -> str:
    """Return what follows the blank; it is scored after each filler."""
    return row["sentence"].partition("_")[2].strip()


def winogrande_fillings(row: Row) -> list[str]:
    """Return the beginning of the sentence with each filler in the blank."""
    start = row["sentence"].partition("_")[0]
    return [start + row["option1"], start + row["option2"]]
