"""evals/lm_tasks: what is read from generated text, against golden strings, and the prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import yaml
from lm_eval.tasks._yaml_loader import load_yaml

from evals.items import Item, Items, make_tasks
from evals.lm_tasks import extract
from evals.schema import DatasetConfig
from evals.task_definitions import definitions, quiet

CONF = Path(__file__).parents[2] / "conf" / "dataset"
PACKAGED = Path(lm_eval.tasks.__file__).parent
NONE = extract.INVALID
QUESTION = {"question": "How many?", "answer": "It is 3 + 4 = <<3+4=7>>7.\n#### 7"}
CHOICES = {
    "question": "How far?", "options": ["A)21", "B)21.5", "C) 22", "D)22.5", "E)none"],
    "rationale": "E", "correct": "E",
}  # fmt: skip

NUMBERS: list[tuple[str, str, str, str]] = [
    # text, strict-match, flexible-extract (before its final stop is ignored), last-number
    ("So she has 5 + 4 = 9. The answer is 9.", "9", "9.", "9"),
    ("The answer is 18", "1", "18", "18"),  # lm-eval's pattern wants one character more
    ("The answer is 1,234.", "1,234", "1,234.", "1234"),
    ("The answer is $1,234.50.", NONE, "$1,234.50.", "1234.5"),
    ("The answer is -7.", "-7", "-7.", "-7"),
    ("The answer is 18.0.", "18.0", "18.0.", "18"),
    ("He pays 3 dollars, then 5 dollars.", NONE, "5", "5"),
    ("There is no number here.", NONE, NONE, NONE),
    ("", NONE, NONE, NONE),
    ("I think it is about 12... maybe", NONE, "12...", "12"),
    ("Thanks for asking... bye", NONE, "...", NONE),
    ("The final result is \\boxed{42}.", NONE, "42", "42"),
    ("$\\boxed{1{,}234}$", NONE, "234", "1234"),
    ("The answer is 3. Wait, the answer is 4.", "3.", "4.", "4"),
    ("The answer is 5 apples.", "5", "5", "5"),
    ("The answer is 10%.", "10", "10", "10"),
    ("10-3=7", NONE, "7", "7"),
    ("x = 10-3", NONE, "-3", "3"),
    ("It drops to -12 degrees", NONE, "-12", "-12"),
    ("The answer is .5.", ".5", ".5.", "0.5"),
    ("He has 2,500 and 3,750 left.", NONE, "3,750", "3750"),
    ("The answer is 7/8.", "7", "8.", "8"),
    ("The answer is 25.\n\nMore text", "25", "25.", "25"),
    ("Answer: 1.2.3", NONE, "1.2.3", "1.2"),
    ("The answer is \N{MINUS SIGN}5.", NONE, "5.", "-5"),
    ("The answer is 1,000,000.", "1,000,000", "1,000,000.", "1000000"),
    ("So (4,5) are the points", NONE, "4,5", "5"),
    ("Room B12 has 3 chairs in row C4", NONE, "4", "3"),
    ("The answer is 100 dollars and 50 cents.", "100", "50", "50"),
    ("The answer is -$15.", NONE, "-$15.", "-15"),
    ("The answer is 0.50.", "0.50", "0.50.", "0.5"),
    ("**The answer is 64.**", "64.", "64.", "64"),
    ("the answer is 9.", NONE, "9.", "9"),
    ("\\frac{3}{4}", NONE, "4", "4"),
    ("12 - 15 = -3", NONE, "-3", "-3"),
    ("-0.0", NONE, "-0.0", "0"),
]

LETTERS: list[tuple[str, str, str]] = [
    # text, strict-match, flexible-extract
    ("The answer is (b).", "b", "b"),
    ("So the answer is (b).", NONE, "b"),
    ("The answer is (B).", "B", "b"),
    ("The answer is b.", NONE, "b"),
    ("The answer is B", NONE, "b"),
    ("Answer: C", NONE, "c"),
    ("Answer: (c)", NONE, "c"),
    ("The answer is \\boxed{D}.", NONE, "d"),
    ("$\\boxed{\\text{E}}$", NONE, "e"),
    ("The correct option is A.", NONE, "a"),
    ("The answer is a number between 1 and 5.", NONE, NONE),
    ("", NONE, NONE),
    ("I do not know.", NONE, NONE),
    ("(a) is wrong and (b) is right. The answer is (b).", "b", "b"),
    ("The answer is (a). Wait, the answer is (d).", "a", "d"),
    ("Option (e) fits.", NONE, "e"),
    ("So it must be (c)", NONE, "c"),
    ("The answer is (f).", NONE, NONE),
    ("The answer is **(d)**.", NONE, "d"),
    ("**Answer:** B", NONE, "b"),
    ("Therefore, the answer is: (a) 50", NONE, "a"),
    ("The answer is (a) 50.", "a", "a"),
    ("A train goes 50 km.", NONE, NONE),
    ("A) 50", NONE, "a"),
    ("B", NONE, "b"),
    ("E.", NONE, "e"),
    ("the answer is option (c).", NONE, "c"),
    ("The answer should be D, as computed.", NONE, "d"),
    ("The answer is 50 km.", NONE, NONE),
    ("The answer is (e) 50 km.", "e", "e"),
    ("The answer would be (b)", NONE, "b"),
    ("The answer isn't clear", NONE, NONE),
    ("Choose C or D; D is right", NONE, "d"),
    ("The answer is $\\textbf{(B)}$", NONE, "b"),
]


def _task(name: str, row: dict[str, Any]) -> Any:
    cfg = DatasetConfig(name=name, source="file", task=name)
    return make_tasks(cfg, Items([Item(f"{name}-0", name, 0, row)], {}, 1))[name]


def _read(task: Any, text: str) -> dict[str, str]:
    """Return what each of a task's filters reads from a generation."""
    request = task.construct_requests(doc=task.eval_docs[0], ctx="", metadata=(None, 0, 1))
    request.resps = [text]
    task._instances = [request]
    task.apply_filters()
    return request.filtered_resps


@pytest.fixture(scope="module")
def gsm8k() -> Any:
    return _task("gsm8k_cot", QUESTION)


@pytest.fixture(scope="module")
def aqua() -> Any:
    return _task("aqua_cot", CHOICES)


@pytest.mark.parametrize(("text", "strict", "flexible", "last"), NUMBERS)
def test_the_numbers_that_are_read(
    gsm8k: Any, text: str, strict: str, flexible: str, last: str
) -> None:
    expected = {"strict-match": strict, "flexible-extract": flexible, "last-number": last}
    assert _read(gsm8k, text) == expected


@pytest.mark.parametrize(("text", "strict", "flexible"), LETTERS)
def test_the_letters_that_are_read(aqua: Any, text: str, strict: str, flexible: str) -> None:
    assert _read(aqua, text) == {"strict-match": strict, "flexible-extract": flexible}


# --- prompts and options ---

AQUA_PROMPT = """\
Q: John found that the average of 15 numbers is 40. If 10 is added to each number then the mean of \
the numbers is?
Answer Choices: (a) 50 (b) 45 (c) 65 (d) 78 (e) 64
A: If 10 is added to each number, then the mean of the numbers also increases by 10. So the new \
mean would be 50. The answer is (a).

"""


def test_aquas_prompt_is_the_papers(aqua: Any) -> None:
    context = aqua.fewshot_context(CHOICES, 4)
    assert context.startswith(AQUA_PROMPT)
    assert context.count("The answer is (") == 4
    assert context.endswith(
        "\n\nQ: How far?\nAnswer Choices: (a) 21 (b) 21.5 (c) 22 (d) 22.5 (e) none\nA:"
    )
    assert aqua.process_results(CHOICES, ["E"]) == {"exact_match": 1.0}
    assert aqua.process_results(CHOICES, ["d"]) == {"exact_match": 0.0}


def test_gsm8ks_exemplars_stops_and_extractions_are_lm_evals() -> None:
    [ours] = definitions(DatasetConfig(name="gsm8k_cot", source="hub", task="gsm8k_cot"))
    theirs = load_yaml(PACKAGED / "gsm8k" / "gsm8k-cot.yaml")
    same = ("dataset_path", "dataset_name", "doc_to_target", "num_fewshot", "metric_list")
    assert {key: ours.config[key] for key in same} == {key: theirs[key] for key in same}
    assert ours.config["doc_to_text"] == theirs["doc_to_text"].rstrip()
    assert ours.config["fewshot_config"] == theirs["fewshot_config"]
    assert ours.config["filter_list"][:2] == theirs["filter_list"]
    assert ours.config["generation_kwargs"]["until"] == theirs["generation_kwargs"]["until"]


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("x\n#### 1,234", "so 1234.00 in all", True),
        ("x\n#### -3", "The answer is -3.", True),
        ("x\n#### 12", "The answer is 12 and not 13.", False),
    ],
)
def test_the_last_number_is_scored_as_a_number(
    gsm8k: Any, answer: str, text: str, right: bool
) -> None:
    row = {"question": "?", "answer": answer}
    read = _read(gsm8k, text)["last-number"]
    assert gsm8k.process_results(row, [read]) == {"exact_match": float(right)}


ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "arc_easy": ("arc/arc_easy.yaml", {
        "id": "1", "question": "What is hot?", "answerKey": "2",
        "choices": {"label": ["1", "2", "3"], "text": ["ice", "fire", "the north"]},
    }),
    "arc_challenge": ("arc/arc_challenge.yaml", {
        "id": "1", "question": "What is hot?", "answerKey": "A",
        "choices": {"label": ["A", "B"], "text": ["fire", "ice"]},
    }),
    "hellaswag": ("hellaswag/hellaswag.yaml", {
        "activity_label": "Home and Garden", "ctx_a": "[header] How to sit [title] Sit.  Down. ",
        "ctx_b": "the Man", "endings": [" sits. [step] Then", "stands", "runs ", "flies"],
        "label": "2",
    }),
    "piqa": ("piqa/piqa.yaml", {"goal": "Sit", "sol1": "on it", "sol2": "in  it", "label": 1}),
    "winogrande": ("winogrande/default.yaml", {
        "sentence": "He took the _  because it was hot.", "option1": "tea", "option2": "hat",
        "answer": "1",
    }),
    "lambada_openai": ("lambada/lambada_openai.yaml", {"text": '"Go," she said,  and he went'}),
    "truthfulqa_mc1": ("truthfulqa/truthfulqa_mc1.yaml", {
        "question": "What is hot?",
        "mc1_targets": {"choices": ["Fire is", "Ice is", "Both are"], "labels": [1, 0, 0]},
    }),
}  # fmt: skip


def _theirs(path: str, row: dict[str, Any], shot: dict[str, Any]) -> Any:
    """Return lm-eval's own task on one row and one exemplar."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    config = load_yaml(PACKAGED / path)
    config = {key: value for key, value in config.items() if key != "tag"}
    own, train = (datasets.Dataset.from_list([each]) for each in (row, shot))
    config["custom_dataset"] = lambda **_: {"train": train, "validation": own, "test": own}
    config["fewshot_config"] = {"sampler": "first_n"}
    with quiet():
        return ConfigurableTask(config=config)


@pytest.mark.parametrize("name", ROWS)
def test_prompts_requests_and_scores_are_lm_evals(name: str) -> None:
    path, row = ROWS[name]
    shots = 0 if name in ("lambada_openai", "truthfulqa_mc1") else 1
    shot = row | {key: f"{text} 2" for key, text in row.items() if isinstance(text, str)}
    shot |= {key: row[key] for key in ("answerKey", "answer", "label") if key in row}
    fewshot = {name: [shot]} if shots else {}
    cfg = DatasetConfig(name=name, source="file", task=name, num_fewshot=shots)
    ours: Any = make_tasks(cfg, Items([Item(f"{name}-0", name, 0, row)], fewshot, 1))[name]
    theirs = _theirs(path, row, shot)
    asked = []
    for task in (ours, theirs):
        doc = task.eval_docs[0]
        context = task.fewshot_context(doc, shots)
        made = task.construct_requests(doc=doc, ctx=context, metadata=(name, 0, 1))
        requests = made if isinstance(made, list) else [made]
        answers = [(-1.0 - i, not i) for i in range(len(requests))]
        scores = task.process_results(doc, answers)
        asked.append(([request.args for request in requests], scores))
    assert asked[0] == asked[1]
    assert set(ours.aggregation()) == set(theirs.aggregation())


TASK_OPTIONS = [
    "gsm8k_cot", "aqua_cot", "bbh_cot", "arc_easy", "arc_challenge", "hellaswag", "piqa",
    "winogrande", "mmlu", "lambada", "truthfulqa_mc", "longbench",
]  # fmt: skip


@pytest.mark.parametrize("option", TASK_OPTIONS)
def test_an_option_names_a_task_on_pinned_data_and_one_of_its_metrics(option: str) -> None:
    values = yaml.safe_load((CONF / f"{option}.yaml").read_text(encoding="utf-8"))
    assert values.pop("defaults") == [{"override /eval@_global_.eval": "downstream"}]
    cfg = DatasetConfig(**values)
    assert cfg.limit is None
    metric, _, read_by = str(cfg.metric).partition(",")
    for task in definitions(cfg):
        assert re.fullmatch("[0-9a-f]{40}", task.arguments(cfg)["revision"])
        assert metric in [line["metric"] for line in task.config["metric_list"]]
        filters = [line["name"] for line in task.config.get("filter_list", [{"name": ""}])]
        assert read_by in filters
