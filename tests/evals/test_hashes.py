"""evals.hashes: right, remembered, and never wrong because of the memory."""

import hashlib
import json
import os

import pytest

from evals import hashes


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    return path


def test_it_hashes_once(file, tmp_path, monkeypatch):
    expected = {"weights": hashlib.sha256(b"abc").hexdigest()}
    assert hashes.cached_sha256([file], tmp_path) == expected
    monkeypatch.setattr(hashes, "file_sha256", lambda path: pytest.fail("read again"))
    assert hashes.cached_sha256([file], tmp_path) == expected


def test_a_touched_file_is_hashed_anew(file, tmp_path):
    hashes.cached_sha256([file], tmp_path)
    stat = file.stat()
    file.write_bytes(b"xyz")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    found = hashes.cached_sha256([file], tmp_path)
    assert found == {"weights": hashlib.sha256(b"xyz").hexdigest()}


@pytest.mark.fault
@pytest.mark.parametrize("content", ["", "{", "[1]", '{"x": 1}', "\xff"])
def test_a_broken_memory_is_an_empty_one(file, tmp_path, content):
    memory = tmp_path / "cache" / "hashes.json"
    memory.parent.mkdir()
    memory.write_text(content, encoding="latin-1")
    assert hashes.cached_sha256([file], tmp_path)["weights"] == hashes.file_sha256(file)
    assert str(file.resolve()) in json.loads(memory.read_text())


def test_a_memory_of_another_shape_is_ignored(file, tmp_path):
    memory = tmp_path / "cache" / "hashes.json"
    memory.parent.mkdir()
    memory.write_text(json.dumps({str(file.resolve()): "abc"}))
    assert hashes.cached_sha256([file], tmp_path)["weights"] == hashes.file_sha256(file)


def test_a_root_that_cannot_be_written_costs_only_time(file, tmp_path):
    (tmp_path / "root").write_text("a file")
    found = hashes.cached_sha256([file], tmp_path / "root")
    assert found == {"weights": hashes.file_sha256(file)}


def test_the_combined_hash_sees_names_and_contents_in_any_order():
    one = hashes.combined_sha256({"a": "1", "b": "2"})
    assert hashes.combined_sha256({"b": "2", "a": "1"}) == one
    assert hashes.combined_sha256({"a": "2", "b": "1"}) != one
    assert hashes.combined_sha256({"a": "1", "c": "2"}) != one
