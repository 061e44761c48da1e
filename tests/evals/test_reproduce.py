"""Records run again: end to end on the tiny model, and what each kind of difference is called."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from evals import cli, explain, reproduce, table_command
from evals import record as store
from evals.names import ConfigError
from evals.reproduce import Difference, compare, find
from tests.evals import fake_records

WORDS = [
    "model=tiny", "dataset.limit=1", "eval.prefill_tokens=128", "eval.scored_tokens=32",
    "eval.bootstrap_samples=20", "tracking=none",
]  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, root: Path, *words: str) -> dict[str, Any]:
    """Run a command as run.py does; return its records by the cache's name."""
    monkeypatch.setenv("GEAR_MLRUNS", str(root))
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    assert cli.main() == 0
    return {record["config"]["cache"]["name"]: record for record in store.records(root)}


def test_a_sweeps_cells_are_shown_explained_and_reproduced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = [*WORDS, "cache=kivi", "gear.bits=2,4", "-m"]
    found = run(monkeypatch, tmp_path, *sweep)
    assert found["fp16"]["words"] == [*WORDS, "gear.bits=2", "cache=fp16"]
    assert found["kivi"]["words"][:-2] == WORDS
    capsys.readouterr()

    assert table_command.main([*sweep, f"out={tmp_path / 'table.csv'}", "format=csv"]) == 0
    lines = (tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()
    assert sum(",FINISHED," in line for line in lines) == 6  # 3 jobs, ppl and KL
    assert explain.main([*sweep, "kivi (gear.bits=4)"]) == 0
    told = capsys.readouterr().out
    assert "status:     FINISHED" in told

    key = told.partition("key:")[2].split()[0]
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert reproduce.main([key[:12]]) == 0
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    said = capsys.readouterr().out
    assert f"key {key[:12]}: equal" in said
    assert said.endswith("environment: equal\nThe result is reproduced.\n")

    record = store.load(tmp_path, key)
    assert record is not None
    record["metrics"]["fidelity/kl_mean"] *= 1 + 1e-12
    record["environment"]["versions"]["mlx"] = "0.0.1"
    store.commit(tmp_path, key, record)
    assert reproduce.main([str(store.record_dir(tmp_path, key))]) == 1
    said = capsys.readouterr().out
    assert "fidelity/kl_mean: then" in said
    assert "(relative 1.0e-12)" in said
    assert "versions.mlx: then 0.0.1" in said
    assert said.endswith("The result is NOT reproduced.\n")


def test_words_that_make_another_config_now_are_said_field_by_field() -> None:
    then = fake_records.finished("gear", 0.125)
    now = copy.deepcopy(then)
    now["config"]["dataset"]["content_hash"] = "ef" * 32
    now["metrics"]["quality/ppl_word/decode"] = 82.0
    now["metrics"]["speed/decode_tok_per_s"] = 1.0
    found = compare(then, now)
    assert found.config == [Difference("dataset.content_hash", "cd" * 32, "ef" * 32)]
    assert found.metrics == [Difference("quality/ppl_word/decode", "41.0", "82.0")]
    assert not found.equal
    told = reproduce.told(then, found)
    assert "differs, its words compose to another config now" in told
    assert "quality/ppl_word/decode: then 41.0, now 82.0 (relative 1.0e+00)" in told


def test_speeds_environment_and_a_logs_tail_do_not_make_results_unequal() -> None:
    then = fake_records.finished("gear", 0.125)
    now = copy.deepcopy(then)
    now["metrics"]["mem/peak_bytes"] = 1
    now["environment"]["git"] = {"commit": "ab" * 20, "dirty": True}
    found = compare(then, now)
    assert found.equal
    assert [d.what for d in found.environment] == ["git.commit", "git.dirty"]
    failed = fake_records.failed()
    later = copy.deepcopy(failed)
    later["error"]["log_tail"] = "another time"
    assert compare(failed, later).equal
    later["error"]["message"] = "another reason"
    assert [d.what for d in compare(failed, later).parts] == ["error"]


def test_a_record_is_found_by_key_run_id_and_folder(tmp_path: Path) -> None:
    records = fake_records.sweep()
    records[0]["mlflow_run_id"] = "f00d" * 8
    fake_records.commit(tmp_path, records)
    key = records[0]["key"]
    for what in (key, key[:16], "f00df00d", str(tmp_path / "records" / key), f"records/{key}"):
        assert find(what, tmp_path)["key"] == key
    with pytest.raises(ConfigError, match=r"no record under .* Next step"):
        find("nothing", tmp_path)


def test_what_cannot_be_run_again_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path))
    [record] = fake_records.commit(tmp_path, [fake_records.finished("kivi")])
    assert reproduce.main([record["key"]]) == 2
    assert "its record is older than the words" in capsys.readouterr().err
    assert reproduce.main([record["key"], "cache=kivi,gear", "-m"]) == 2
    assert "makes 2 jobs; must be one" in capsys.readouterr().err
    assert reproduce.main([record["key"], "model=local", "model.path=/nowhere"]) == 2
    assert "no such folder" in capsys.readouterr().err
