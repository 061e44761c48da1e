"""Paper-style tables: their exact text in every format, and what a table may not hide.

After a change that is meant, `UPDATE_GOLDEN=1 pytest tests/evals/test_tables.py` writes
tests/golden anew; read its diff.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from evals.table_formats import FORMATS, latex
from evals.tables import Entry, Table, table
from tests.evals import fake_cells
from tests.evals.fake_cells import answered, cells, config

GOLDEN = Path(__file__).parents[1] / "golden"
ENDINGS = {"md": "md", "latex": "tex", "csv": "csv", "html": "html"}
COMMAND = ["experiment=fake"]


def paper() -> Table:
    return table(fake_cells.paper())


def entry(made: Table, method: str, column: tuple[str, ...]) -> Entry:
    at = [tuple(c) for c in made.columns].index(column)
    return dict(made.rows)[method][at]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", ["paper", "perplexity"])
def test_golden(case: str, form: str) -> None:
    text = FORMATS[form](table(getattr(fake_cells, case)()), COMMAND)
    path = GOLDEN / f"{case}.{ENDINGS[form]}"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


GSM = ("llama3_8b", "gsm8k_cot", "", "exact_match-strict-match")
QWEN = ("qwen3_8b", "gsm8k_cot", "", "exact_match-strict-match")


def test_a_cell_is_value_interval_change_and_what_is_reported() -> None:
    assert entry(paper(), "kivi (gear.bits=2)", GSM).lines == (
        "30.0 [21.9, 39.6]", "Δ -20.0‡", "reported 30.17¶",
    )  # fmt: skip
    assert entry(paper(), "gear", GSM).lines[1:] == ("Δ +1.0", "reported 54.59¶")
    assert entry(paper(), "fp16", GSM).lines == ("50.0 [40.4, 59.6]", "reported 54.21¶")


def test_what_is_bold_is_the_best_without_fp16() -> None:
    made = paper()
    bold = [method for method, row in made.rows if row[1].bold]
    assert bold == ["gear"]
    lower = table(fake_cells.perplexity())
    assert [m for m, row in lower.rows if row[1].bold] == ["gear (gear.rank=8)†"]


def test_missing_failed_and_marked_cells_are_shown_as_such() -> None:
    made = paper()
    assert [method for method, _ in made.rows][1:] == [
        "kivi (gear.bits=2)", "kivi (gear.bits=4)*", "gear", "mlx_quant",
    ]  # fmt: skip
    assert entry(made, "gear", QWEN).lines[0] == "failed"
    assert entry(made, "mlx_quant", (*QWEN[:1], "aqua_cot", *QWEN[2:])).lines == ("—",)
    text = FORMATS["md"](made, COMMAND)
    assert "— 6 of 20 cells have no record. 1: not run yet; 5: model.repo='owner/name'" in text
    assert "failed: gear · gsm8k\\_cot · qwen3\\_8b: WorkerDied (SIGSEGV)" in text


def test_an_average_needs_every_score_of_its_row() -> None:
    made = paper()
    assert made.columns[-1][-1] == "average"
    assert {row[-1].lines for _, row in made.rows} == {("—",)}
    whole = [cell for cell in fake_cells.paper() if cell.config.model.name == "llama3_8b"]
    rows = dict(table(whole).rows)
    assert rows["kivi (gear.bits=2)"][-1].lines == ("30.0", "Δ -20.0")
    assert rows["gear"][-1].bold
    assert rows["mlx_quant"][-1].lines == ("—",)


def test_one_task_has_no_average() -> None:
    assert table(fake_cells.perplexity()).columns[-1][-1] == "KL"


def test_the_papers_whole_table_has_its_reported_average_and_size() -> None:
    jobs = [
        config("gear", model, data)
        for model in ("llama3_8b", "llama2_13b", "mistral_7b")
        for data in ("gsm8k_cot", "aqua_cot", "bbh_cot")
    ]
    [(_, row)] = table(cells([(job, answered(job, 50), None) for job in jobs])).rows
    assert row[0].lines[-1] == "reported 27.6¶"
    assert row[-1].lines == ("50.0", "Δ +0.0", "reported 40.20¶")


def test_a_metric_that_no_config_names_is_known_from_the_columns_records() -> None:
    job, other = config("fp16", "tiny", "arc"), config("gear", "tiny", "arc")
    record = answered(job, 50)
    nameless = [replace(j, dataset=replace(j.dataset, metric=None)) for j in (job, other)]
    made = table(cells([(nameless[0], record, None), (nameless[1], None, None)]))
    assert [column[-1] for column in made.columns] == ["KV size %", "exact_match-strict-match"]


def test_every_cell_with_a_key_resolves_in_every_format() -> None:
    made = paper()
    keys = {cell.key for cell in made.cells if cell.key}
    lines = list(csv.DictReader(io.StringIO(FORMATS["csv"](made, COMMAND))))
    assert {line["key"] for line in lines} - {""} == keys
    assert all(line["command"].startswith("python run.py model=") for line in lines)
    page = FORMATS["html"](made, COMMAND)
    assert set(re.findall(r'href="#run-(\w+)"', page)) == keys
    assert set(re.findall(r'id="run-(\w+)"', page)) == keys
    for form in ("md", "latex"):
        assert all(str(key)[:8] in FORMATS[form](made, COMMAND) for key in keys)


def test_a_page_needs_nothing_from_elsewhere_and_is_escaped() -> None:
    page = FORMATS["html"](table(fake_cells.perplexity()), ["model.path=<script>"])
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!#)', page)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_the_latex_compiles(tmp_path: Path) -> None:
    (tmp_path / "paper.tex").write_text(latex(paper(), COMMAND, standalone=True), encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "paper.pdf").stat().st_size > 1000
