"""evals.items: a task's rows, its exemplars, the subset, and lm-eval's task objects on them."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from evals import task_definitions
from evals.data_files import DataError
from evals.items import Item, Items, load_items, make_tasks, narrow
from evals.schema import DatasetConfig
from evals.task_definitions import definitions

FIXTURES = Path(__file__).parent / "fixtures"
ARC = {"label": ["A", "B"], "text": ["ice", "fire"]}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def arc(n: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"id": str(i), "question": f"What is hot {i}?", "choices": ARC, "answerKey": "B"}
        for i in range(start, start + n)
    ]


def config(tmp_path: Path, n: int = 20, **fields: Any) -> DatasetConfig:
    """ARC-Easy out of files: n items, and 8 rows of train."""
    given = {
        "name": "arc_easy", "source": "file", "task": "arc_easy",
        "path": write(tmp_path / "test.jsonl", arc(n)),
        "fewshot_path": write(tmp_path / "train.jsonl", arc(8, 100)),
    }  # fmt: skip
    return DatasetConfig(**{**given, **fields})


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(f"the network was asked for: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder of tasks of one's own in place of the project's."""
    folder = tmp_path / "lm_tasks"
    folder.mkdir()
    monkeypatch.setattr(task_definitions, "FOLDER", folder)
    task_definitions._manager.cache_clear()

    def add(name: str, text: str) -> None:
        (folder / name).write_text(text, encoding="utf-8")

    yield add
    task_definitions._manager.cache_clear()


# --- what is read ---


def test_items_are_the_rows_in_order_with_their_place(tmp_path: Path) -> None:
    items = load_items(config(tmp_path), seed=0)
    assert [item.id for item in items.scored] == [f"arc_easy-{i}" for i in range(20)]
    assert [item.index for item in items.scored] == list(range(20))
    assert {item.task for item in items.scored} == {"arc_easy"}
    assert items.scored[3].row == arc(20)[3]
    assert items.total == 20
    assert items.fewshot == {"arc_easy": arc(5, 100)}
    assert items.fewshot_from == {"arc_easy": "train[:5]"}


def test_the_limit_is_a_seeded_subset_in_the_sources_order(tmp_path: Path) -> None:
    some = load_items(config(tmp_path, limit=6), seed=0)
    places = [item.index for item in some.scored]
    assert places == sorted(set(places))
    assert len(places) == 6
    assert places != list(range(6))
    assert some.total == 20
    assert some == load_items(config(tmp_path, limit=6), seed=0)
    assert places != [i.index for i in load_items(config(tmp_path, limit=6), seed=1).scored]
    assert load_items(config(tmp_path, limit=50), seed=0) == load_items(config(tmp_path), seed=0)


def test_a_larger_limit_and_another_row_change_the_hash(tmp_path: Path) -> None:
    hashes = {load_items(config(tmp_path, limit=n), 0).content_hash for n in (4, 5)}
    hashes.add(load_items(config(tmp_path, n=21), 0).content_hash)
    hashes.add(load_items(config(tmp_path, num_fewshot=4), 0).content_hash)
    hashes.add(load_items(config(tmp_path), 0).content_hash)
    hashes.add(load_items(config(tmp_path), 1).content_hash)  # all items: the seed does nothing
    assert len(hashes) == 5
    assert all(len(digest) == 64 for digest in hashes)


def test_without_a_split_of_their_own_exemplars_are_taken_from_the_items(tmp_path: Path) -> None:
    items = load_items(config(tmp_path, fewshot_path=None), seed=0)
    assert items.fewshot == {"arc_easy": arc(5)}
    assert items.fewshot_from == {"arc_easy": "test[:5]"}
    assert [item.index for item in items.scored] == list(range(5, 20))
    assert items.total == 15


def test_no_exemplars_need_no_rows(tmp_path: Path) -> None:
    items = load_items(config(tmp_path, fewshot_path="/no/such.jsonl", num_fewshot=0), seed=0)
    assert (items.fewshot, items.fewshot_from) == ({}, {})
    [task] = make_tasks(config(tmp_path, num_fewshot=0), items).values()
    context = task.fewshot_context(items.scored[0].row, task.config.num_fewshot)
    assert context == "Question: What is hot 0?\nAnswer:"


def test_exemplars_of_the_yaml_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "g.jsonl", [{"question": "Q", "answer": "#### 1"}])
    cfg = DatasetConfig(name="g", source="file", task="gsm8k_cot", path=path)
    assert load_items(cfg, 0).fewshot == {}
    cfg.num_fewshot = 9
    with pytest.raises(DataError, match=r"num_fewshot=9: gsm8k_cot has 8 exemplars"):
        load_items(cfg, 0)


def test_parquet_is_read_too(tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "test.parquet"
    datasets.Dataset.from_list(arc(20)).to_parquet(str(path))
    expected = load_items(config(tmp_path), 0)
    assert load_items(config(tmp_path, path=str(path)), 0).content_hash == expected.content_hash


def test_a_group_reads_a_folder_with_a_file_for_each_task(tmp_path: Path) -> None:
    own, shots = tmp_path / "items", tmp_path / "dev"
    cfg = DatasetConfig(
        name="mmlu", source="file", task="mmlu_stem", path=str(own), fewshot_path=str(shots)
    )
    rows = [{"question": f" Q{i} ", "choices": list("wxyz"), "answer": i % 4} for i in range(6)]
    for folder in (own, shots):
        folder.mkdir()
        for task in definitions(cfg):
            write(folder / f"{task.name}.jsonl", rows)
    items = load_items(cfg, 0)
    names = list(dict.fromkeys(item.task for item in items.scored))
    assert len(names) == 19
    assert items.total == 19 * 6
    some = load_items(DatasetConfig(**{**vars(cfg), "limit": 2}), 0)
    tasks = make_tasks(cfg, some)
    assert set(tasks) == {item.task for item in some.scored}  # only those that are asked
    (own / f"{names[-1]}.jsonl").unlink()
    with pytest.raises(DataError, match=f"holds neither {names[-1]}.parquet nor"):
        load_items(cfg, 0)


# --- lm-eval's tasks ---


def test_the_task_object_renders_requests_and_scores_without_a_network(tmp_path: Path) -> None:
    cfg = config(tmp_path, limit=3)
    items = load_items(cfg, 0)
    tasks = make_tasks(cfg, items)
    task: Any = tasks["arc_easy"]
    assert [doc["question"] for doc in task.eval_docs] == [i.row["question"] for i in items.scored]
    doc = items.scored[1].row
    contexts = {task.fewshot_context(row, 5) for row in [doc] * 3}
    shots = "".join(f"Question: What is hot {i}?\nAnswer: fire\n\n" for i in range(100, 105))
    assert contexts == {f"{shots}Question: {doc['question']}\nAnswer:"}
    [context] = contexts
    requests = task.construct_requests(doc=doc, ctx=context, metadata=("arc_easy", 1, 1))
    assert [request.args for request in requests] == [(context, " ice"), (context, " fire")]
    assert task.process_results(doc, [(-2.0, False), (-1.0, True)]) == {"acc": 1.0, "acc_norm": 1.0}
    assert task.process_results(doc, [(-1.0, True), (-2.0, False)])["acc"] == 0.0
    assert task.aggregation()["acc"]([1.0, 0.0]) == 0.5
    assert task.config.num_fewshot == 5


def test_two_contexts_and_one_ending_where_a_task_scores_contexts() -> None:
    row = {"sentence": "The _ is hot.", "option1": "ice", "option2": "fire", "answer": "2"}
    items = Items([Item("winogrande-0", "winogrande", 0, row)], {"winogrande": [row]}, 1)
    cfg = DatasetConfig(name="w", source="file", task="winogrande", num_fewshot=1)
    task: Any = make_tasks(cfg, items)["winogrande"]
    contexts = task.fewshot_context(row, 1)
    assert contexts == [f"The fire is hot.\n\nThe {filler}" for filler in ("ice", "fire")]
    requests = task.construct_requests(doc=row, ctx=contexts, metadata=("w", 0, 1))
    assert [request.args[1] for request in requests] == [" is hot."] * 2
    assert task.process_results(row, [(-2.0, False), (-1.0, False)]) == {"acc": 1.0}


def test_hellaswag_is_cleaned_as_lm_eval_cleans_it() -> None:
    row = {
        "activity_label": "Cooking", "ctx_a": "A man [title] stirs.", "ctx_b": "he THEN",
        "endings": [" eats. ", "sleeps [step] now."], "label": "0",
    }  # fmt: skip
    items = Items([Item("hellaswag-0", "hellaswag", 0, row)], {}, 1)
    cfg = DatasetConfig(name="h", source="file", task="hellaswag", num_fewshot=0)
    task: Any = make_tasks(cfg, items)["hellaswag"]
    context = task.fewshot_context(row, 0)
    assert context == "Cooking: A man. stirs. He then"
    requests = task.construct_requests(doc=row, ctx=context, metadata=("h", 0, 1))
    assert [request.args[1] for request in requests] == [" eats.", " sleeps now."]
    assert task.process_results(row, [(-1.0, False), (-2.0, False)])["acc"] == 1.0


@pytest.mark.fault
def test_rows_without_the_tasks_fields_are_named(tmp_path: Path) -> None:
    cfg = config(tmp_path, path=write(tmp_path / "x.jsonl", [{"q": "?"}]))
    with pytest.raises(DataError, match=r"its rows \(fields: q\) do not fit .*allenai/ai2_arc"):
        make_tasks(cfg, load_items(cfg, 0))


PROCESSED = """
task: odd
dataset_path: some/where
test_split: test
fewshot_split: test
num_fewshot: 1
output_type: multiple_choice
process_docs: !function odd.only
doc_to_text: "{{text}}"
doc_to_choice: ["no", "yes"]
doc_to_target: 1
"""
ODD = """
def only(dataset):
    return dataset.filter(lambda row: row["n"] % 2).map(lambda row: {"text": f"N{row['n']}:"})
"""


def test_what_a_task_drops_is_no_item(tmp_path: Path, own_tasks: Any) -> None:
    own_tasks("odd.yaml", PROCESSED)
    own_tasks("odd.py", ODD)
    path = write(tmp_path / "n.jsonl", [{"n": n} for n in range(10)])
    cfg = DatasetConfig(name="odd", source="file", task="odd", path=path)
    items = load_items(cfg, 0)
    assert [item.row["text"] for item in items.scored] == ["N3:", "N5:", "N7:", "N9:"]
    assert items.fewshot["odd"] == [{"n": 1, "text": "N1:"}]
    task: Any = make_tasks(cfg, items)["odd"]
    assert [doc["n"] for doc in task.eval_docs] == [3, 5, 7, 9]
    assert task.fewshot_context(items.scored[0].row, 1) == "N1: yes\n\nN3:"


def test_the_hash_holds_the_definition_but_not_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = DatasetConfig(name="h", source="file", task="hellaswag")
    before = task_definitions.fingerprint(definitions(cfg))
    copy = tmp_path / "elsewhere"
    shutil.copytree(task_definitions.FOLDER, copy)
    monkeypatch.setattr(task_definitions, "FOLDER", copy)
    task_definitions._manager.cache_clear()
    try:
        assert task_definitions.fingerprint(definitions(cfg)) == before
        text = (copy / "hellaswag.yaml").read_text(encoding="utf-8")
        (copy / "hellaswag.yaml").write_text(text + 'target_delimiter: ""\n', encoding="utf-8")
        task_definitions._manager.cache_clear()
        assert task_definitions.fingerprint(definitions(cfg)) != before
    finally:
        task_definitions._manager.cache_clear()
    changed = Items([], {}, 0, {}, "another")
    assert changed.content_hash != Items([], {}, 0, {}, before).content_hash


# --- length ---


def test_a_least_length_is_applied_before_the_limit(tmp_path: Path) -> None:
    cfg = config(tmp_path, limit=4, min_context_tokens=10)
    items = load_items(cfg, 0)
    assert len(items.scored) == 20
    long = narrow(items, cfg, 0, lambda item: 10 if item.index % 2 else 9)
    assert len(long.scored) == 4
    assert all(item.index % 2 for item in long.scored)
    assert long.total == 10
    with pytest.raises(DataError, match=r"min_context_tokens=10: none of 20 items"):
        narrow(items, cfg, 0, lambda item: 9)
    plain = load_items(config(tmp_path, limit=4), 0)
    assert narrow(plain, config(tmp_path, limit=4), 0, lambda item: 0) is plain


# --- the groups that lm-eval carries ---


@pytest.mark.parametrize(
    ("task", "count", "repo", "revision"),
    [
        ("mmlu", 57, "cais/mmlu", "c30699e8356da336a370243923dbaf21066bb9fe"),
        ("bbh_cot", 27, "SaylorTwift/bbh", "b5306be6f827cfafbb545ff5a51f96916029b0fd"),
        ("longbench", 21, "Xnhyacinth/LongBench", "2e9ade51ebf45d98942056c0716234f9d5d257d5"),
    ],
)
def test_groups_are_all_their_tasks_on_pinned_data(
    task: str, count: int, repo: str, revision: str
) -> None:
    cfg = DatasetConfig(name=task, source="hub", task=task)
    found = definitions(cfg)
    assert len({d.name for d in found}) == len(found) == count
    assert {d.repo for d in found} == {repo}
    assert {d.arguments(cfg)["revision"] for d in found} == {revision}
    assert len({d.subset for d in found}) == count
    assert found[0].arguments(DatasetConfig(revision="mine"))["revision"] == "mine"
    shots = {"mmlu": 5, "bbh_cot": 3, "longbench": 0}
    assert {d.shots(cfg) for d in found} == {shots[task]}


def test_a_part_of_a_group_is_asked_as_in_the_group() -> None:
    whole = {d.name: d for d in definitions(DatasetConfig(name="mmlu", task="mmlu"))}
    [one] = definitions(DatasetConfig(name="mmlu", task="mmlu_anatomy"))
    assert one == whole["mmlu_anatomy"]
    assert one.shots(DatasetConfig()) == 5
    stem = definitions(DatasetConfig(name="mmlu", task="mmlu_stem"))
    assert [whole[d.name] for d in stem] == stem
    # LongBench-E is other data, which the group's commit does not pin
    [other] = definitions(DatasetConfig(name="longbench", task="longbench_trec_e"))
    assert "revision" not in other.arguments(DatasetConfig())


def test_longbench_says_which_packages_its_scores_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.longbench.metrics", raising=False)
    cfg = config(tmp_path, task="longbench_trec")
    with pytest.raises(DataError, match=r"pip install 'lm-eval\[longbench\]'"):
        load_items(cfg, 0)


# --- what is refused ---


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"task": None}, r"dataset\.task=None: .* needs a task's name"),
        ({"task": "arc_esy"}, r"'arc_esy' is unknown; did you mean 'arc_easy'.*dataset=lm_eval"),
        ({"source": "embedded"}, r"source='embedded' has no rows of tasks: .*package"),
        ({"limit": 0}, r"dataset\.limit=0: allowed are null"),
        ({"num_fewshot": -1}, r"dataset\.num_fewshot=-1"),
        ({"num_fewshot": 9}, r"num_fewshot=9: arc_easy has 8 exemplars here \(train\[:9\]\)"),
        ({"min_context_tokens": 0}, r"min_context_tokens=0"),
        ({"path": None}, r"dataset\.path=None"),
        ({"path": "/no/such.jsonl"}, r"/no/such\.jsonl: No such file .*arc_easy\.jsonl"),
        ({"path": "/no/such.csv"}, r"ends in '\.csv'"),
        ({"source": "hub", "fewshot_path": None}, r"dataset\.path=.* is not used"),
    ],
)
def test_unusable_settings(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        load_items(config(tmp_path, **fields), 0)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'test' holds no rows"):
        load_items(config(tmp_path, n=0, num_fewshot=0), 0)


def test_a_task_with_code_of_its_own_is_refused(own_tasks: Any) -> None:
    own_tasks("own.yaml", "task: own\nclass: some.Thing\n")
    with pytest.raises(DataError, match=r"'own': makes its data or requests by code"):
        definitions(DatasetConfig(name="own", source="hub", task="own"))


# --- the hub ---


class FakeHub:
    """Stands for datasets.load_dataset: answers with rows by split, keeps what was asked."""

    def __init__(self, tables: dict[str, list[dict[str, Any]]]) -> None:
        self.tables = tables
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, path: str, **arguments: Any) -> Any:
        import datasets

        self.asked.append((path, arguments))
        return datasets.Dataset.from_list(self.tables[arguments["split"]])


def test_the_hub_is_asked_for_the_yamls_data_at_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub({"test": arc(20), "train": arc(40, 100)})
    monkeypatch.setattr("datasets.load_dataset", hub)
    cfg = DatasetConfig(name="arc_easy", source="hub", task="arc_easy")
    assert load_items(cfg, 0).content_hash == load_items(config(tmp_path), 0).content_hash
    revision = "210d026faf9955653af8916fad021475a3f00453"
    arguments = {"name": "ARC-Easy", "revision": revision}
    assert hub.asked == [
        ("allenai/ai2_arc", {**arguments, "split": split}) for split in ("test", "train")
    ]


def test_out_of_reach_the_hubs_message_says_how_to_bring_the_rows() -> None:
    cfg = DatasetConfig(name="aqua_cot", source="hub", task="aqua_cot")
    with pytest.raises(DataError) as caught:
        load_items(cfg, 0)
    message = str(caught.value)
    assert "deepmind/aqua_rat (split test) could not be loaded" in message
    assert "to_parquet('ITEMS/aqua_cot.parquet')" in message
    assert "dataset.source=file dataset.path=ITEMS" in message
    assert "33301c6a050c96af81f63cad5562cb5363e88971" in message
