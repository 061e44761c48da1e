"""scripts/tables.py: its own words, run.py's words, and answers to wrong ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evals import table_command
from evals.names import ConfigError
from evals.published import lookup, over_all
from evals.table_command import split

SCRIPTS = Path(__file__).parents[2] / "scripts"
GEAR = {
    "cache.name": "gear", "gear.bits": "2", "gear.rank": "4", "gear.sparse_frac": "0.02",
    "gear.base": "grouped", "gear.outlier_stage": "pre_quant",
}  # fmt: skip


def test_its_own_words_are_taken_out_of_run_pys() -> None:
    options, words = split(["experiment=smoke", "format=csv", "out=a=b.csv", "gear.rank=4", "-m"])
    assert options == {"format": "csv", "out": "a=b.csv", "standalone": "false"}
    assert words == ["experiment=smoke", "gear.rank=4", "-m"]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["format=latx"], "format=latx: must be one of md, latex, csv, html. Did you mean latex?"),
        (["standalone=yes"], "standalone=yes: must be one of true, false."),
        (["standalone=true"], "standalone=true: is for format=latex, not format=md."),
    ],
)
def test_a_wrong_word_is_answered(words: list[str], answer: str) -> None:
    with pytest.raises(ConfigError) as error:
        split(words)
    assert str(error.value) == answer


def test_wrong_words_of_run_py_are_answered_as_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path))
    assert table_command.main(["experiment=smok"]) == 2
    assert "Did you mean smoke?" in capsys.readouterr().err
    assert table_command.main([]) == 2


@pytest.mark.parametrize("name", ["tables", "explain", "reproduce"])
def test_the_scripts_say_what_they_do(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)  # noqa: S603
    assert f"python scripts/{name}.py" in done.stdout


def test_a_reported_value_is_that_of_its_settings_and_says_whose_it_is() -> None:
    found = lookup(GEAR, "llama2_13b", "aqua_cot")
    assert found is not None
    assert (found.value, found.model, found.differs) == (23.62, "LLaMA2-13B", None)
    other = lookup(GEAR, "smollm2", "gsm8k_cot")
    assert other is not None
    assert (other.value, other.model) == (54.59, "LLaMA3-8B")
    assert other.differs == "another model than smollm2"
    assert lookup({**GEAR, "gear.rank": "8"}, "llama2_13b", "aqua_cot") is None
    assert lookup({**GEAR, "dataset.num_fewshot": "0"}, "llama2_13b", "aqua_cot") is None
    assert lookup(GEAR, "llama2_13b", "arc_easy") is None


def test_a_reported_mean_is_for_the_papers_whole_table_only() -> None:
    models, data = ("llama3_8b", "llama2_13b", "mistral_7b"), ("gsm8k_cot", "aqua_cot", "bbh_cot")
    every = {(m, d) for m in models for d in data}
    found = over_all(GEAR, every)
    assert found is not None
    assert (found.value, found.model) == (40.20, "LLaMA3-8B, LLaMA2-13B, Mistral-7B")
    assert over_all(GEAR, every - {("llama3_8b", "bbh_cot")}) is None
    size = over_all(GEAR, every, "kv_size_pct")
    assert size is not None
    assert size.value == 27.6
