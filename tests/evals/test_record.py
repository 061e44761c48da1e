"""Records on disk: keys, atomic commit, locks, equality, samples."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from evals import record as store

CONFIG = {"cache": {"name": "gear", "layers": [{"k": {"bits": 2}}]}, "seed": 0}
KEY = store.run_key(CONFIG)


def make_record(**changes: Any) -> dict[str, Any]:
    return {
        "key": KEY, "status": "FINISHED", "config": CONFIG,
        "metrics": {"quality/ppl_token/decode": 3.5, "speed/decode_tok_per_s": 10.0},
        "guards": {}, "environment": {"python": "3"}, "started": "a", "finished": "b",
        "mlflow_run_id": None, **changes,
    }  # fmt: skip


def test_root_is_the_variable_else_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path / "here"))
    assert store.results_root() == tmp_path / "here"
    monkeypatch.delenv("GEAR_MLRUNS")
    monkeypatch.chdir(tmp_path)
    assert store.results_root() == Path(store.__file__).parents[1] / "mlruns"


def test_root_of_an_installed_package_is_in_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GEAR_MLRUNS", raising=False)
    monkeypatch.setattr(store, "__file__", str(tmp_path / "site-packages" / "evals" / "record.py"))
    monkeypatch.chdir(tmp_path)
    assert store.results_root() == tmp_path / "mlruns"


def test_key_is_the_known_hash_of_canonical_json() -> None:
    # printf '{"a":{"b":[1,2.5]},"c":null}' | sha256sum
    expected = "d90f04692c13692b1d20c7146f77bddac4631e467898b00b0c719c500a665bc6"
    assert store.run_key({"c": None, "a": {"b": (1, 2.5)}}) == expected


def test_key_ignores_order_and_survives_json() -> None:
    config = {"layers": {10: "a", 9: "b"}, "x": 0.1}
    assert store.run_key(dict(reversed(config.items()))) == store.run_key(config)
    assert store.run_key(json.loads(json.dumps(config))) == store.run_key(config)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_key_refuses_what_json_cannot_say(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        store.run_key({"x": value})


def test_commit_and_load(tmp_path: Path) -> None:
    assert store.load(tmp_path, KEY) is None
    store.commit(tmp_path, KEY, make_record())
    assert store.load(tmp_path, KEY) == make_record()
    assert [record["key"] for record in store.records(tmp_path)] == [KEY]
    assert [path.name for path in store.record_dir(tmp_path, KEY).iterdir()] == ["record.json"]


@pytest.mark.fault
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("FINISHED", "RUNNING"),
        lambda text: text.replace('"bits": 2', '"bits": 4'),
        lambda text: text.replace('"guards"', '"gards"'),
    ],
    ids=["cut", "empty", "no record", "unknown status", "another config", "missing field"],
)
def test_a_damaged_record_is_none(tmp_path: Path, damage: Any) -> None:
    store.commit(tmp_path, KEY, make_record())
    path = store.record_dir(tmp_path, KEY) / "record.json"
    path.write_text(damage(path.read_text()))
    assert store.load(tmp_path, KEY) is None
    assert list(store.records(tmp_path)) == []


def test_a_commit_that_fails_leaves_the_old_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(tmp_path, KEY, make_record(started="old"))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.commit(tmp_path, KEY, make_record(started="new"))
    assert store.load(tmp_path, KEY) == make_record(started="old")
    assert [path.name for path in store.record_dir(tmp_path, KEY).iterdir()] == ["record.json"]


def test_commit_refuses_a_number_that_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        store.commit(tmp_path, KEY, make_record(metrics={"x": float("nan")}))
    assert store.load(tmp_path, KEY) is None


def test_the_run_id_is_filled_in_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must name a record"):
        store.set_run_id(tmp_path, KEY, "first")
    store.commit(tmp_path, KEY, make_record())
    assert store.set_run_id(tmp_path, KEY, "first") == "first"
    assert store.set_run_id(tmp_path, KEY, "second") == "first"
    assert store.load(tmp_path, KEY) == make_record(mlflow_run_id="first")


def test_equal_ignores_time_place_and_speed_only() -> None:
    a = make_record()
    b = copy.deepcopy(a)
    b.update(started="x", finished="y", environment={}, mlflow_run_id="z")
    b["metrics"].update({"speed/decode_tok_per_s": 1.0, "mem/peak_bytes": 5})
    assert store.equal(a, b)
    for name, value in {"status": "FAILED", "config": {}, "guards": {"finite": "passed"}}.items():
        assert not store.equal(a, {**b, name: value})
    b["metrics"]["quality/ppl_token/decode"] += 1e-12
    assert not store.equal(a, b)


def test_a_lock_is_waited_for_and_announced(tmp_path: Path) -> None:
    waiting, order = threading.Event(), []

    def other() -> None:
        with store.lock(tmp_path, KEY, waiting.set):
            order.append("other")

    thread = threading.Thread(target=other)
    with store.lock(tmp_path, KEY):
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


def test_samples_round_trip_and_start_fresh(tmp_path: Path) -> None:
    path = tmp_path / "new" / "samples.jsonl"
    for run in range(2):
        with store.SampleWriter(path) as writer:
            writer.write({"run": run, "nll": [0.1, 1e-300], "text": "ä\u2028\n"})
            assert store.read_samples(path) == [
                {"run": run, "nll": [0.1, 1e-300], "text": "ä\u2028\n"}
            ]


def test_an_orphan_writer_cannot_reach_the_new_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with store.SampleWriter(path) as orphan, store.SampleWriter(path) as writer:
        writer.write({"from": "writer"})
        orphan.write({"from": "orphan"})
    assert store.read_samples(path) == [{"from": "writer"}]


@pytest.mark.fault
def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    whole = '{"a": 1}\n{"a": 2}\n'
    for torn in ("", '{"a": 3', '{"a": 3}', "\xff"):
        path.write_bytes((whole + torn).encode("latin-1"))
        assert store.read_samples(path) == [{"a": 1}, {"a": 2}]


def test_a_broken_line_before_the_last_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(ValueError, match=r"samples\.jsonl line 2"):
        store.read_samples(path)


@pytest.mark.fault
def test_a_sample_must_be_finite(tmp_path: Path) -> None:
    with (
        store.SampleWriter(tmp_path / "samples.jsonl") as writer,
        pytest.raises(ValueError, match="finite"),
    ):
        writer.write({"nll": [1.0, float("nan")]})
    assert store.read_samples(tmp_path / "samples.jsonl") == []
