"""Retrieval tasks that need no download: prompts from a seed, and their exact scores.

``dataset=passkey needle vartrack freqwords`` (evals/retrieval_forms.py says what each asks). A
prompt has at most its cell's length in tokens of the model's tokenizer, question included, and a
few tokens less at most; a chat template and the answer come on top. What is drawn for an item
follows from (seed, task, length, depth, number): fewer or other cells leave the rest as they are.
No MLX.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

from evals import retrieval_forms as forms
from evals.data_files import DataError, nearest
from evals.haystack import GRASS, Draws, Tokenizer, real_text
from evals.items import Item
from evals.schema import DatasetConfig

GENERATORS = tuple(forms.FORMS)
"""The tasks, as ``dataset.task``."""
OF_DEPTHS = ("passkey", "needle")
"""Those that hide one thing at a depth; in the others it is all over the text."""
_NOT_USED = ("path", "num_fewshot", "fewshot_path", "min_context_tokens")


def generate(cfg: DatasetConfig, tokenizer: Tokenizer, seed: int) -> list[Item]:
    """Return the items: every length, for each every depth, for each ``per_cell`` of them.

    With ``cfg.limit`` a subset that `seed` picks, in the same order. A row holds ``task``,
    ``prompt``, its end ``prefix`` (the answer's beginning: in a chat the model's own words),
    ``answers`` (strings), ``length`` (tokens), ``depth`` (None where it has no meaning),
    ``max_new`` (tokens to generate) and ``until`` (strings that end the generation).

    Raises:
        DataError: an unknown task, or cells that cannot be; names the field and what is allowed.
    """
    _check(cfg)
    task, texts = str(cfg.task), forms.Texts(tokenizer)
    depths = cfg.depths if task in OF_DEPTHS else [None]
    cells = list(product(cfg.lengths or (), depths or (), range(cfg.per_cell)))
    items = []
    for index in _chosen(len(cells), cfg.limit, seed):
        length, depth, number = cells[index]
        length, depth = int(length), None if depth is None else float(depth)
        row = forms.FORMS[task](texts, length, depth, Draws(seed, task, length, depth, number))
        row |= {"task": task, "length": length, "depth": depth}
        items.append(Item(id=f"{task}-{index}", task=task, index=index, row=row))
    return items


def total(cfg: DatasetConfig) -> int:
    """Return the number of items without ``cfg.limit``."""
    _check(cfg)
    return len(cfg.lengths or ()) * len(cfg.depths or (None,)) * cfg.per_cell


def fingerprint(cfg: DatasetConfig) -> str:
    """Return a sha256 (64 hex digits) of what prompts are made of beside ``cfg`` and the seed."""
    _check(cfg)
    filler = real_text() if cfg.task == "needle" else GRASS
    made_of = [forms.VERSION, cfg.task, filler]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()


def score(row: Mapping[str, Any], text: str) -> dict[str, float]:
    """Return how a generation answers an item: ``acc`` is exact, ``recall`` is RULER's score.

    acc is 1 where, by task:
    - passkey, needle: the first number of the text is the answer;
    - vartrack: the words of three or more capitals but VAR, in the first paragraph that has one,
      are the answers, all of them and no others;
    - freqwords: the first three different words of six small letters are the answers, in any
      order.

    recall is the share of the answers that the text contains anywhere, small letters or capitals.
    """
    answers = row["answers"]
    found = _READERS[row["task"]](text)
    recalled = sum(answer.lower() in text.lower() for answer in answers)
    return {"acc": float(found == set(answers)), "recall": recalled / len(answers)}


def _number(text: str) -> set[str]:
    """Return the first number, without the commas between its thousands."""
    found = re.search(r"\d{1,3}(?:,\d{3})+(?!\d)|\d+", text)
    return {found[0].replace(",", "")} if found else set()


def _variables(text: str) -> set[str]:
    """Return the variables of the first paragraph that names one."""
    paragraphs = (
        re.findall(r"\b(?!VAR\b)[A-Z]{3,}\b", part) for part in re.split(r"\n\s*\n", text)
    )
    return set(next(filter(None, paragraphs), ()))


def _words(text: str) -> set[str]:
    """Return the first three different words that could be coded ones."""
    words = dict.fromkeys(re.findall(r"\b[a-z]{6}\b", text))
    return set(list(words)[: forms.ASKED_WORDS])


_READERS = {"passkey": _number, "needle": _number, "vartrack": _variables, "freqwords": _words}


def _chosen(total: int, limit: int | None, seed: int) -> list[int]:
    """Return which of ``total`` items are asked."""
    if limit is None or limit >= total:
        return list(range(total))
    return sorted(Draws(seed, "limit").shuffled(range(total))[:limit])


def _check(cfg: DatasetConfig) -> None:
    """Refuse settings that give no cells, or none that mean something."""
    if cfg.task not in GENERATORS:
        raise DataError(
            f"dataset.task={cfg.task!r} is no retrieval task; {nearest(str(cfg.task), GENERATORS)}."
            " Next step: use dataset=NAME with one of these names."
        )
    for name in _NOT_USED:
        if (value := getattr(cfg, name)) is not None:
            raise DataError(
                f"dataset.{name}={value!r} is not used by generated items; allowed: null. "
                "Next step: leave it out."
            )
    if cfg.limit is not None and cfg.limit < 1:
        raise DataError(
            f"dataset.limit={cfg.limit}: allowed are null (all) and whole numbers from 1. "
            "Next step: give the number of items to use."
        )
    if cfg.per_cell < 1:
        raise DataError(
            f"dataset.per_cell={cfg.per_cell}: allowed are whole numbers from 1. "
            "Next step: give the number of items of each length and depth."
        )
    _check_list("lengths", cfg.lengths, "whole numbers of tokens from 1", lambda n: n >= 1)
    if cfg.task in OF_DEPTHS:
        _check_list("depths", cfg.depths, "shares of the text from 0 to 1", lambda d: 0 <= d <= 1)
    elif cfg.depths:
        raise DataError(
            f"dataset.depths={cfg.depths}: {cfg.task} hides things all over the text; allowed: "
            "null. Next step: leave it out."
        )


def _check_list(name: str, values: Any, allowed: str, fits: Any) -> None:
    """Refuse a list that is missing or empty, holds what is not allowed, or something twice."""
    wrong = [value for value in values or () if not fits(value)]
    if values and not wrong and len(set(values)) == len(values):
        return
    what = f" has {wrong[0]}" if wrong else " names a cell twice" if values else " is empty"
    raise DataError(
        f"dataset.{name}={values}{what}; allowed are different {allowed}. "
        f"Next step: for example 'dataset.{name}=[{'512,1024' if name == 'lengths' else '0,0.5'}]'."
    )
