"""Retrieval prompts: their length, what they hide and where, that they repeat, and their scores."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import Any

import pytest

from evals import retrieval
from evals import retrieval_forms as forms
from evals.data_files import DataError
from evals.haystack import real_sentences, real_text
from evals.retrieval import GENERATORS, fingerprint, generate
from evals.schema import DatasetConfig
from evals.tiny import ByteTokenizer

GRASS_TEXT = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)


class WordTokenizer:
    """Words with the blank before them, single digits and other signs; a BOS in front."""

    def encode(self, text: str) -> list[int]:
        """Return one id a piece."""
        pieces = re.findall(r" ?[^\W\d]+| ?[^\w\s]+|\d|\s", text)
        return [0, *(int(hashlib.sha256(p.encode()).hexdigest()[:8], 16) for p in pieces)]


WORDS, BYTES = WordTokenizer(), ByteTokenizer()


def config(task: str, **changes: Any) -> DatasetConfig:
    """Return a generator's config, with depths where it has them."""
    depths = [0.0, 0.25, 0.5, 0.75, 1.0] if task in retrieval.OF_DEPTHS else None
    given = {"lengths": [512, 1024], "depths": depths} | changes
    return DatasetConfig(name=task, source="generated", task=task, **given)


def rows(task: str, tokenizer: Any = WORDS, seed: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """Return the generated rows."""
    return [item.row for item in generate(config(task, **changes), tokenizer, seed)]


@pytest.mark.parametrize("task", GENERATORS)
@pytest.mark.parametrize(
    ("tokenizer", "lengths", "close"),
    [(WORDS, [384, 512, 1000, 2048, 4096], 4), (BYTES, [1500, 4096], 8)],
    ids=["words", "bytes"],
)
def test_prompts_are_never_longer_and_hardly_shorter(
    task: str, tokenizer: Any, lengths: list[int], close: int
) -> None:
    for row in rows(task, tokenizer, lengths=lengths, per_cell=2):
        assert 0 <= row["length"] - len(tokenizer.encode(row["prompt"])) <= close


@pytest.mark.model
@pytest.mark.parametrize("task", GENERATORS)
def test_prompts_fit_a_real_tokenizer_up_to_128k(smollm2: Any, task: str) -> None:
    _, tokenizer = smollm2
    depths = [0.25] if task in retrieval.OF_DEPTHS else None
    for row in rows(task, tokenizer, lengths=[512, 1024, 8192, 131072], depths=depths):
        assert 0 <= row["length"] - len(tokenizer.encode(row["prompt"])) <= 4


@pytest.mark.model
def test_the_bundled_model_finds_a_passkey(smollm2: Any) -> None:
    """One plain pass, no cache: what any exact cache must find too."""
    import mlx.core as mx

    model, tokenizer = smollm2
    (row,) = rows("passkey", tokenizer, lengths=[512], depths=[0.5])
    asked = tokenizer.encode(row["prompt"])
    answer = tokenizer.encode(f" {row['answers'][0]}")
    logits = model(mx.array([asked + answer[:-1]]))[0, len(asked) - 1 :]
    assert mx.argmax(logits, axis=-1).tolist() == answer  # each token is the greedy one


@pytest.mark.parametrize("task", GENERATORS)
def test_cells_come_in_a_fixed_order(task: str) -> None:
    cfg = config(task, per_cell=2)
    items = generate(cfg, WORDS, 0)
    cells = [(i.row["length"], i.row["depth"]) for i in items]
    assert cells == [
        (n, d) for n in cfg.lengths or () for d in cfg.depths or [None] for _ in (0, 1)
    ]
    assert [i.id for i in items] == [f"{task}-{n}" for n in range(retrieval.total(cfg))]
    assert [i.index for i in items] == list(range(len(items)))
    assert {i.task for i in items} == {task}
    for row in (i.row for i in items):
        assert set(row) == {
            "task", "prompt", "prefix", "answers", "length", "depth", "max_new", "until",
        }  # fmt: skip
        assert row["prompt"].endswith(f" {row['prefix']}")
        assert 0 < row["max_new"] <= 64


@pytest.mark.parametrize("task", GENERATORS)
def test_an_item_follows_from_its_own_cell_and_number(task: str) -> None:
    prompts = {(r["length"], r["depth"]): r["prompt"] for r in rows(task)}
    for row in rows(task, lengths=[1024]):
        assert prompts[row["length"], row["depth"]] == row["prompt"]
    both = rows(task, per_cell=2)
    assert [row["prompt"] for row in both][::2] == list(prompts.values())
    assert len({row["prompt"] for row in both}) == len(both)
    if task in retrieval.OF_DEPTHS:
        assert rows(task, depths=[0.5])[0]["prompt"] == prompts[512, 0.5]
    assert [row["answers"] for row in rows(task, seed=1)] != [row["answers"] for row in rows(task)]


@pytest.mark.parametrize("task", GENERATORS)
def test_a_limit_is_a_subset_that_repeats(task: str) -> None:
    whole = generate(config(task, per_cell=3), WORDS, 0)
    some = generate(config(task, per_cell=3, limit=4), WORDS, 0)
    assert len(some) == 4
    assert some == [item for item in whole if item in some]
    assert generate(config(task, per_cell=3, limit=4), WORDS, 0) == some
    assert generate(config(task, limit=1000), WORDS, 0) == generate(config(task), WORDS, 0)


@pytest.mark.parametrize(
    ("task", "digest"),
    [
        ("passkey", "45da63fd4213e01d"),
        ("needle", "bd80e1e34345e212"),
        ("vartrack", "db0b4cbc15a8cb75"),
        ("freqwords", "1880ffeb74f80300"),
    ],
)
def test_prompts_are_the_same_on_every_machine(task: str, digest: str) -> None:
    """Other prompts are another VERSION."""
    made = repr([(row["prompt"], row["answers"]) for row in rows(task, BYTES, lengths=[2000])])
    assert (forms.VERSION, hashlib.sha256(made.encode()).hexdigest()[:16]) == (1, digest)


def test_passkey_is_the_published_prompt() -> None:
    row = rows("passkey", depths=[0.5], lengths=[512])[0]
    (key,) = row["answers"]
    task, before, info, behind, question = row["prompt"].split("\n")
    assert task == (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "them. I will quiz you about the important information there."
    )
    assert info == f"The pass key is {key}. Remember it. {key} is the pass key."
    assert question == "What is the pass key? The pass key is"
    filler = " ".join([GRASS_TEXT] * 100)
    assert f"{before} {behind}".startswith(filler[:1500])
    assert re.fullmatch(r"[1-9]\d{4}", key)


@pytest.mark.parametrize("task", retrieval.OF_DEPTHS)
def test_the_answer_lies_at_its_depth(task: str) -> None:
    for row in rows(task, lengths=[2048], depths=[0.0, 0.1, 0.25, 0.5, 0.9, 1.0]):
        hidden = re.search(r"The pass key is \d|One of the special magic numbers", row["prompt"])
        end = row["prompt"].rindex("\n")
        assert hidden is not None
        start = row["prompt"].index("\n")
        if row["depth"] == 0.0:
            assert hidden.start() == start + 1
        if row["depth"] == 1.0:
            assert row["prompt"][hidden.start() : end].count(row["answers"][0]) >= 1
            assert end - hidden.start() < 80
        before = len(WORDS.encode(row["prompt"][start : hidden.start()]))
        behind = len(WORDS.encode(row["prompt"][hidden.end() : end]))
        assert before / (before + behind) == pytest.approx(row["depth"], abs=0.02)


def test_a_needle_lies_between_whole_sentences_of_real_text() -> None:
    for row in rows("needle", lengths=[512, 4096]):
        context = row["prompt"].split("\n")[1]
        match = re.search(r"One of the special magic numbers for (\w+) is: (\d{7})\.", context)
        assert match is not None
        city, number = match.groups()
        assert [number] == row["answers"]
        assert context.count(number) == context.count(city) == 1
        assert row["prompt"].endswith(
            f"\nWhat is the special magic number for {city} mentioned in the provided text? "
            f"The special magic number for {city} mentioned in the provided text is"
        )
        around = (context[: match.start()], context[match.end() :])
        for part in filter(None, map(str.strip, around)):
            assert _whole_sentences(part)


def _whole_sentences(text: str) -> bool:
    """Tell whether a text is made of sentences of the addresses, almost all in their order."""
    known = real_sentences()
    for start, first in enumerate(known):
        if not text.startswith(first):
            continue
        rest, number, passed = text, start, 0
        while rest and passed < len(known):
            sentence = known[number % len(known)]
            number, passed = number + 1, passed + 1
            if rest.startswith(sentence):
                rest, passed = rest[len(sentence) :].lstrip(), 0
        if not rest:
            return True
    return False


def test_no_city_is_named_in_the_real_text() -> None:
    assert not [c for c in forms.CITIES if re.search(rf"\b{c}\b", real_text(), re.IGNORECASE)]
    assert len(set(forms.CITIES)) == len(forms.CITIES) >= 50


def test_vartrack_has_one_chain_and_asks_for_all_of_it() -> None:
    for row in rows("vartrack", lengths=[512, 2048], per_cell=3):
        _, asked = row["prompt"].split("\n\n\n")
        values: dict[str, str] = {}
        for name, value in re.findall(r"VAR ([A-Z]+) = (\d+|VAR [A-Z]+)", asked):
            values[name] = values[value[4:]] if value.startswith("VAR") else value
        (value,) = set(values.values())
        assert list(values) == row["answers"]
        assert len(values) == 5
        assert f"assigned the value {value} in the text above." in asked
        assert asked.endswith(f"5 variables are assigned the value {value}, they are:")
        assert not re.search(r"VAR \w+ = (\d+|VAR \w+) VAR", asked)


def test_vartrack_shows_a_worked_example_first() -> None:
    row = rows("vartrack", lengths=[512])[0]
    example, _ = row["prompt"].split("\n\n\n")
    names = re.findall(r"VAR ([A-Z]{3}) =", example)
    assert example.endswith(f"they are: {' '.join(names)}")
    assert len(names) == 5


def test_freqwords_are_the_three_most_frequent() -> None:
    for row in rows("freqwords", lengths=[512, 4096, 20_000], per_cell=2):
        coded = row["prompt"].split("coded words. ")[1].split("\nQuestion")[0]
        counts = Counter(coded.split())
        (noise, most), *ranked = counts.most_common()
        assert noise == "..."
        assert [word for word, _ in ranked[:3]] == row["answers"]
        assert most > ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)
        if row["length"] == 20_000:  # the frequencies of a zeta distribution with exponent 2
            for rank, (_, n) in enumerate(ranked[:5], 2):
                assert n / most == pytest.approx(1 / rank**2, rel=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "paskey"}, r"dataset\.task='paskey' .* did you mean 'passkey'\? Available: freq"),
        ({"task": None}, r"dataset\.task=None is no retrieval task"),
        ({"lengths": None}, r"dataset\.lengths=None is empty; allowed are different whole numbers"),
        ({"lengths": []}, r"dataset\.lengths=\[\] is empty"),
        ({"lengths": [512, 0]}, r"dataset\.lengths=\[512, 0\] has 0; allowed"),
        ({"lengths": [512, 512]}, r"dataset\.lengths=\[512, 512\] names a cell twice"),
        ({"lengths": [40]}, r"dataset\.lengths=40: the text around the filler alone takes \d+ tok"),
        ({"depths": None}, r"dataset\.depths=None is empty; allowed are different shares"),
        ({"depths": []}, r"dataset\.depths=\[\] is empty"),
        ({"depths": [0.5, 1.5]}, r"dataset\.depths=\[0.5, 1.5\] has 1\.5; allowed .* from 0 to 1"),
        ({"depths": [-0.1]}, r"has -0\.1"),
        ({"depths": [float("nan")]}, r"has nan"),
        ({"depths": [0, 0.0]}, r"names a cell twice"),
        ({"per_cell": 0}, r"dataset\.per_cell=0: allowed are whole numbers from 1"),
        ({"limit": 0}, r"dataset\.limit=0: allowed are null"),
        ({"num_fewshot": 5}, r"dataset\.num_fewshot=5 is not used by generated items"),
        ({"path": "a.jsonl"}, r"dataset\.path='a\.jsonl' is not used"),
    ],
)
def test_what_gives_no_cells_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        generate(config("passkey", **change) if "task" not in change else _task(**change), WORDS, 0)


def _task(task: str | None) -> DatasetConfig:
    return DatasetConfig(
        name="x", source="generated", task=task, lengths=[512], depths=[0.5], per_cell=1
    )


@pytest.mark.parametrize("task", ["vartrack", "freqwords"])
def test_tasks_without_a_depth_take_none(task: str) -> None:
    with pytest.raises(DataError, match=rf"dataset\.depths=\[0\.5\]: {task} hides things all over"):
        generate(config(task, depths=[0.5]), WORDS, 0)
    assert {row["depth"] for row in rows(task, depths=[])} == {None}


def test_words_that_do_not_differ_in_frequency_are_refused() -> None:
    with pytest.raises(DataError, match=r"dataset\.lengths=120: too short for words that differ"):
        rows("freqwords", lengths=[120])


@pytest.mark.parametrize("task", GENERATORS)
def test_the_length_that_an_error_names_is_enough(task: str) -> None:
    least = 20
    for _ in range(5):
        try:
            rows(task, lengths=[least], depths=[0.5] if task in retrieval.OF_DEPTHS else None)
            break
        except DataError as error:
            found = re.search(r"use (\d+) or more", str(error))
            assert found is not None
            least = int(found[1])
    assert least < 600


def test_the_fingerprint_is_the_texts_not_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    prints = {task: fingerprint(config(task)) for task in GENERATORS}
    assert len(set(prints.values())) == len(prints)
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in prints.values())
    assert fingerprint(config("needle", lengths=[4096], per_cell=3)) == prints["needle"]
    monkeypatch.setattr(retrieval, "real_text", lambda: "Other text.")
    assert fingerprint(config("needle")) != prints["needle"]
    assert fingerprint(config("passkey")) == prints["passkey"]
    monkeypatch.setattr(forms, "VERSION", 2)
    assert fingerprint(config("passkey")) != prints["passkey"]
