"""Texts, ids and names of a stranger: read as data, shown as text, kept in their folder."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evals import report
from evals.cli import _announce
from evals.compose import plan
from evals.data import load_documents
from evals.data_files import DataError
from evals.html_report import html
from evals.items import load_items, make_tasks
from evals.record import SAMPLES, SampleWriter, read_samples
from evals.schema import DatasetConfig
from evals.tracking_files import table, write_sweep
from tests.evals.fake_records import commit, failed, finished

pytestmark = pytest.mark.fault

LONG = 10_000_000


def source(path: Path, **values: Any) -> DatasetConfig:
    return DatasetConfig(name="file", source="file", path=str(path), **values)


def lines(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_a_line_of_ten_megabytes_is_one_text(tmp_path: Path) -> None:
    text = "a b " * (LONG // 4)
    path = lines(tmp_path, json.dumps({"text": text}), '{"text": "short"}')
    assert [document.text for document in load_documents(source(path), 0)] == [text, "short"]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ('{"text": "a\\u0000b"}', "holds a NUL at character 1"),
        ('{"text": "a\\ud800b"}', "holds half a surrogate pair"),
        ('{"text": 7}', "row 0 holds int, expected text"),
        ('{"text": ["a"]}', "row 0 holds list, expected text"),
        ('{"text": null}', "row 0 holds NoneType, expected text"),
        ('{"texts": "a"}', "no field dataset.text_field='text'; did you mean 'texts'"),
        ('["a"]', "line 1 is a JSON list"),
        ("[" * 100_000, "line 1 is not JSON: maximum recursion depth"),
        ('{"text": ' + "9" * 5000 + "}", "line 1 is not JSON"),
        ('{"text": "a"', "line 1 is not JSON"),
    ],
)
def test_a_row_that_is_no_text(tmp_path: Path, row: str, answer: str) -> None:
    with pytest.raises(DataError) as refused:
        load_documents(source(lines(tmp_path, row)), 0)
    assert answer in str(refused.value)
    assert "Next step: " in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_bytes(b"\xff\xfea\0b\0")
    with pytest.raises(DataError, match="is not UTF-8: byte 0xff at offset 0"):
        load_documents(source(tmp_path / "own.txt"), 0)


def test_an_id_of_a_row_is_nothing_and_a_file_name_is_one(tmp_path: Path) -> None:
    path = lines(tmp_path, json.dumps({"id": "../../x", "text": "a"}))
    assert [document.id for document in load_documents(source(path), 0)] == ["own-000000"]
    for name in (".hidden\n.txt", "a\nb.txt", "\x1b[2J.txt"):
        folder = tmp_path / "texts"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("a", encoding="utf-8")
    with pytest.raises(DataError, match="is not a plain name"):
        load_documents(source(folder), 0)


@pytest.mark.parametrize("task", ["../../etc/passwd", "/etc/passwd", "own\n"])
def test_a_task_that_is_a_path(tmp_path: Path, task: str) -> None:
    with pytest.raises(DataError, match=r"dataset\.task=.* is unknown"):
        load_items(source(lines(tmp_path, "{}"), task=task), 0)


def test_a_row_of_a_task_with_wrong_fields(tmp_path: Path) -> None:
    config = source(lines(tmp_path, '{"../../x": 1}'), task="arc_easy", num_fewshot=0)
    with pytest.raises(DataError, match=r"do not fit its templates.*Next step"):
        make_tasks(config, load_items(config, 0))


def test_a_sample_of_anything_is_one_line(tmp_path: Path) -> None:
    text = 'a\nb\r\u2028\x00"}\n{"forged": 1}'
    with SampleWriter(tmp_path / SAMPLES) as writer:
        writer.write({"id": "../../x", "text": text})
    assert read_samples(tmp_path / SAMPLES) == [{"id": "../../x", "text": text}]


EVIL = (
    "<script>alert(1)</script>", "=HYPERLINK(1)", "[red]x[/] [/y]", "a\n\\input{x} % & $ # _",
    "a | b\n| c", "</pre><img src=x onerror=alert(1)>",
)  # fmt: skip


@pytest.fixture
def records(tmp_path: Path) -> list[dict[str, Any]]:
    """Records as a stranger may send them: their names are not held against ours."""
    names = {"model": {"name": EVIL[0]}, "dataset": {"name": EVIL[5]}}
    found = [finished("fp16", **names), *(finished(name, **names) for name in EVIL)]
    broken = failed(EVIL[5], **names)
    broken["error"] |= {"message": EVIL[5], "log_tail": f"{EVIL[2]}\n{EVIL[0]}"}
    return commit(tmp_path, [*found, broken])


def test_markup_of_names_and_logs_is_text_in_the_report(records: list[dict[str, Any]]) -> None:
    samples = {record["key"]: [] for record in records}
    page = html(records, samples.__getitem__, [EVIL[0], EVIL[5]], None, {})
    assert "default-src 'none'" in page
    assert page.count("&lt;script&gt;") > 3
    assert "<script" not in page
    assert "<img src=x" not in page


def test_names_are_text_in_every_table(records: list[dict[str, Any]], tmp_path: Path) -> None:
    from evals.sweeps import Sweep

    sweep = Sweep([record["key"] for record in records], [], [EVIL[0]], "gear")
    (tmp_path / "out").mkdir()
    write_sweep(tmp_path / "out", tmp_path, sweep, records)
    made = {path.suffix: path.read_text("utf-8") for path in (tmp_path / "out").glob("table.*")}
    for row in csv.reader(io.StringIO(made[".csv"])):
        assert not [cell for cell in row if cell[:1] in ("=", "+", "@", "\t", "\r")]
    assert "'=HYPERLINK(1)" in made[".csv"]
    assert "<script" not in made[".html"]
    assert "\\input" not in made[".tex"]
    assert "\\textbackslash{}input\\{x\\}" in made[".tex"]
    rows = [line for line in made[".md"].splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(records)
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1


def test_names_are_text_on_the_terminal(records: list[dict[str, Any]]) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=400, color_system=None)
    report.print_results(records, None, console)
    assert isinstance(console.file, io.StringIO)
    assert "[red]x[/] [/y]" in console.file.getvalue()


def test_words_are_text_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    _announce(plan(["model=tiny", "model.path='[/y][red]x'"]))
    assert "[/y][red]x" in capsys.readouterr().err


def test_a_comment_of_latex_ends_with_its_line() -> None:
    assert report.latex_comment("a\n\\input{x}") == "% a \\input{x}"


def test_a_table_of_samples_is_data(tmp_path: Path) -> None:
    shown = json.loads(table([{"text": EVIL[0], "more": {"a": [EVIL[1]]}}]))
    assert shown == {"columns": ["text", "more"], "data": [[EVIL[0], '{"a": ["=HYPERLINK(1)"]}']]}
