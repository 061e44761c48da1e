"""Records in an object store: whole or not there, only what is finished, no secrets in the URL."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

import pytest

from evals import record as store
from evals.share import Share, ShareError, problem
from tests.evals.fake_records import commit, failed, finished


@pytest.mark.parametrize("url", [None, "s3://bucket/folder", "gs://b", "az://b/c", "file:///data"])
def test_a_url_that_can_be_used(url: str | None) -> None:
    assert problem(url) is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://user:hunter2@bucket", "no user name or password"),
        ("s3://bucket?key=hunter2", "must be null or a URL"),
        ("simplecache::s3://bucket", "must be null or a URL"),
        ("/data/hunter2", "must be null or a URL"),
        ("github://hunter2", "known: s3, gs"),
    ],
)
def test_a_url_that_cannot_be_used_and_is_not_repeated(url: str, said: str) -> None:
    found = problem(url)
    assert found is not None
    assert said in found
    assert "hunter2" not in found


def shared(tmp_path: Path) -> tuple[Share, str]:
    """Return a share that holds a record, and its key."""
    (record,) = commit(tmp_path / "here", [{**finished(), "mlflow_run_id": "a-run-here"}])
    folder = store.record_dir(tmp_path / "here", record["key"])
    (folder / "samples.jsonl").write_text('{"id": 1}\n')
    share = Share(f"file://{tmp_path}/share")
    assert not share.has(record["key"])
    share.put(tmp_path / "here", record["key"])
    assert share.has(record["key"])
    return share, record["key"]


def brought(share: Share, root: Path, key: str) -> dict[str, object] | None:
    """Bring a record into a results root, as a session does."""
    with store.lock(root, key):
        return share.get(root, key)


def test_a_record_comes_back_equal_with_its_samples_and_without_its_run(tmp_path: Path) -> None:
    share, key = shared(tmp_path)
    record, there = store.load(tmp_path / "here", key), tmp_path / "there"
    found = brought(share, there, key)
    assert record is not None
    assert found == store.load(there, key) == {**record, "mlflow_run_id": None}
    assert (store.record_dir(there, key) / "samples.jsonl").read_text() == '{"id": 1}\n'
    assert brought(share, there, "0" * 64) is None


def test_an_object_that_is_not_a_whole_finished_record_of_that_key_is_none(tmp_path: Path) -> None:
    share, key = shared(tmp_path)
    path, there = tmp_path / "share" / f"{key}.zip", tmp_path / "there"
    whole = path.read_bytes()
    for cut in range(0, len(whole), 50):
        path.write_bytes(whole[:cut])
        assert brought(share, there, key) is None
    path.write_bytes(b"<html>")
    assert brought(share, there, key) is None
    path.rename(path.with_name(f"{'1' * 64}.zip"))
    assert brought(share, there, "1" * 64) is None
    (bad,) = commit(tmp_path / "here", [failed("kivi")])
    share.put(tmp_path / "here", bad["key"])
    assert brought(share, there, bad["key"]) is None
    assert list(store.records(there)) == []


def test_names_in_an_object_lead_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    share, key = shared(tmp_path)
    with zipfile.ZipFile(tmp_path / "share" / f"{key}.zip", "a") as packed:
        packed.writestr("../../../escaped", "x")
        packed.writestr("more.txt", "x")
    assert brought(share, tmp_path / "there", key) is not None
    assert not list(tmp_path.rglob("escaped"))
    assert not list((tmp_path / "there").rglob("more.txt"))


def test_a_store_that_cannot_be_reached_is_told_as_such(tmp_path: Path) -> None:
    (record,) = commit(tmp_path, [finished()])
    (tmp_path / "share").write_text("a file where the folder should be")
    with pytest.raises(ShareError, match="records are safe in the results root"):
        Share(f"file://{tmp_path}/share").put(tmp_path, record["key"])
