"""The fp16 arm's log-probabilities on disk: exact round trip, bound, damage, odd names."""

from __future__ import annotations

import os

import mlx.core as mx
import pytest

from evals.logprobs import LogprobStore, Reference


def _reference(seed: int = 0, tokens: int = 8, vocabulary: int = 50) -> Reference:
    logits = mx.random.normal((tokens, vocabulary), key=mx.random.key(seed))
    log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return Reference(
        log_probs.astype(mx.float16), -log_probs[:, 0], log_probs.argmax(-1).astype(mx.int32)
    )


def _equal(a: Reference, b: Reference) -> bool:
    return all(
        x.dtype == y.dtype and mx.array_equal(x, y)
        for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


def _files(store: LogprobStore) -> list[str]:
    return sorted(path.name for path in store.base.glob("*/*"))


def test_what_is_put_comes_back_bit_for_bit(tmp_path):
    store, reference = LogprobStore(tmp_path, "key"), _reference()
    store.put("doc", 0, reference)
    assert _equal(LogprobStore(tmp_path, "key").get("doc", 0), reference)
    assert store.get("doc", 1) is None
    assert store.get("other", 0) is None
    assert LogprobStore(tmp_path, "other").get("doc", 0) is None


@pytest.mark.fault
@pytest.mark.parametrize("document", ["../../escape", "a/b", "x" * 500, "ü·—", ""])
def test_any_document_id_stays_in_the_folder(tmp_path, document):
    store = LogprobStore(tmp_path, "key")
    store.put(document, 0, _reference())
    assert store.get(document, 0) is not None
    assert [p.parent for p in tmp_path.rglob("*.safetensors")] == [store.folder]


def test_oldest_files_of_all_keys_go_first(tmp_path):
    first = LogprobStore(tmp_path, "first")
    first.put("doc", 0, _reference())
    size = first.path("doc", 0).stat().st_size
    os.utime(first.path("doc", 0), (1, 1))
    store = LogprobStore(tmp_path, "second", max_bytes=2 * size)
    store.put("doc", 0, _reference())
    os.utime(store.path("doc", 0), (2, 2))
    assert first.get("doc", 0) is not None
    store.put("doc", 1, _reference())
    assert first.get("doc", 0) is None
    assert store.get("doc", 0) is not None
    store.put("doc", 2, _reference())
    assert store.get("doc", 0) is None
    assert store.get("doc", 2) is not None


@pytest.mark.fault
@pytest.mark.parametrize("keep", [0, 5, 300, -10])
def test_a_damaged_file_counts_as_absent(tmp_path, keep):
    store = LogprobStore(tmp_path, "key")
    store.put("doc", 0, _reference())
    path = store.path("doc", 0)
    path.write_bytes(path.read_bytes()[:keep])
    assert store.get("doc", 0) is None
    store.put("doc", 0, _reference())
    assert store.get("doc", 0) is not None


def test_a_foreign_file_counts_as_absent(tmp_path):
    store = LogprobStore(tmp_path, "key")
    store.folder.mkdir(parents=True)
    mx.save_safetensors(str(store.path("doc", 0)), {"weights": mx.ones(3)})
    assert store.get("doc", 0) is None


def test_what_cannot_be_written_is_logged_and_left(tmp_path, caplog):
    store = LogprobStore(tmp_path, "key")
    store.base.write_text("a file where the folder should be")
    store.put("doc", 0, _reference())
    assert store.get("doc", 0) is None
    assert "not kept" in caplog.text


@pytest.mark.fault
def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    store = LogprobStore(tmp_path, "key")
    save = mx.save_safetensors

    def cut_short(path: str, arrays: dict[str, mx.array]) -> None:
        save(path, arrays)
        raise RuntimeError("disk full")

    monkeypatch.setattr(mx, "save_safetensors", cut_short)
    store.put("doc", 0, _reference())
    assert _files(store) == []
