"""What a cell is: found by name, key or run id, and told whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals import explain
from evals.explain import Known, answer, matches, of_root
from tests.evals import fake_records

KNOWN = [
    Known("fp16 · embedded · tiny", "ab" * 32, None, ["cache=fp16"]),
    Known("gear (gear.rank=4) · embedded · tiny", "cd" * 32, None, ["cache=gear"]),
    Known("gear (gear.rank=8) · embedded · tiny", "ce" * 32, None, ["gear.rank=8"]),
    Known("gear_l · embedded · tiny", None, None, ["cache=gear_l"], "not here"),
]


@pytest.mark.parametrize(
    ("what", "indices"),
    [
        ("fp16 · embedded · tiny", [0]),
        ("FP16", [0]),
        ("gear rank=4", [1]),
        ("cdcd", [1]),
        ("cexx", []),
        ("gear", [1, 2, 3]),
        ("gear · embedded", [1, 2, 3]),
        ("ce" * 32, [2]),
        ("kcvt", []),
    ],
)
def test_what_a_word_means(what: str, indices: list[int]) -> None:
    expected = [KNOWN[i] for i in indices]
    assert matches(what, KNOWN) == expected


def test_several_are_listed_and_none_is_answered_with_the_nearest() -> None:
    text, found = answer("rank", KNOWN)
    assert (found, text.splitlines()) == (False, [
        "'rank' is 2 cells:",
        "  cdcdcdcd  gear (gear.rank=4) · embedded · tiny",
        "  cececece  gear (gear.rank=8) · embedded · tiny",
    ])  # fmt: skip
    text, found = answer("fp61 · embedded · tiny", KNOWN)
    assert not found
    assert text.splitlines()[:2] == [
        "'fp61 · embedded · tiny': there is no such cell. The nearest of 4:",
        "  abababab  fp16 · embedded · tiny",
    ]
    assert answer("x", [])[0].startswith("'x': there is no record here.")


def test_a_cell_that_was_not_run_says_how_it_would_be() -> None:
    text, found = answer("gear_l", KNOWN)
    assert found
    assert "status:     not here" in text
    assert "again:      python run.py cache=gear_l" in text
    assert "key:" not in text
    assert "status:     not run yet" in answer("cdcd", KNOWN)[0]


def test_a_record_is_told_whole(tmp_path: Path) -> None:
    records = fake_records.sweep()
    records[1]["words"] = ["cache=gear", "gear.k={bits: 4}"]
    records[1]["mlflow_run_id"] = "f00d" * 8
    fake_records.commit(tmp_path, records)
    text, found = answer("f00d", of_root(tmp_path))
    key = records[1]["key"]
    assert found
    assert text.splitlines() == [
        "gear (gear.rank=4) · embedded · tiny",
        "  status:     FINISHED",
        "  ppl:        22.50 [18.50, 21.25]",
        "  ΔNLL:       +0.1250 [+0.1150, +0.1375]",
        "  KL:         0.0625",
        "  flips:      6.2%",
        "  tok/s:      96.0",
        "  bytes:      268.55 KiB stored, 170.90 KiB accounted, 4.77 MiB peak; 13.8% of fp16's"
        " 1.91 MiB",
        "  guards:     metrics finite passed",
        "  protocol:   1; decode; seed 0",
        "  data:       embedded cdcdcdcd (6 documents, 1 window of each)",
        "  model:      tiny abababab; cpu float32",
        "  commit:     unknown",
        "  measured:   2026-01-02T03:04:25+00:00, python 3.11.7",
        f"  MLflow run: {'f00d' * 8}",
        f"  key:        {key}",
        f"  record:     records/{key} in the results root",
        "  again:      python run.py cache=gear 'gear.k={bits: 4}'",
        f"  compare:    python scripts/reproduce.py {key[:12]}",
    ]


def test_a_failed_record_says_why_and_an_old_one_that_it_keeps_no_words(tmp_path: Path) -> None:
    fake_records.commit(tmp_path, [fake_records.failed("kivi")])
    text, _ = answer("kivi", of_root(tmp_path))
    assert "  status:     FAILED\n  error:      WorkerDied (SIGSEGV)" in text
    assert "again:      its record is older than" in text
    assert "compare" not in text


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path))
    fake_records.commit(tmp_path, fake_records.sweep())
    assert explain.main(["fp16"]) == 0
    assert explain.main(["gear"]) == 1
    assert explain.main(["model=tiny", "cache=kivi", "kivi"]) == 0
    assert capsys.readouterr().out.count("not run yet") == 1
    assert explain.main(["gear.rnak=8", "kivi"]) == 2
    assert "Did you mean gear.rank?" in capsys.readouterr().err
    assert explain.main(["--help"]) == 0
