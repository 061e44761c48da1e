"""Tables: their exact text in every format, and what they show of failures, marks and gaps."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from evals import columns, report
from evals.tracking import SweepView
from gear.config import GearConfig
from tests.evals.fake_records import failed, finished, sweep

MARKDOWN = """\
| method | KV size % | stored | accounted | ppl | ΔNLL | KL | flips | tok/s | status | run |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |
| fp16 | 100.0 | 1.91 MiB | 0 B | 20.00 [18.50, 21.25] | - | - | - | 96.0 | FINISHED | run0 |
| gear (gear.rank=4) | 13.8 | 268.55 KiB | 170.90 KiB | 22.50 [18.50, 21.25] \
| +0.1250 [+0.1150, +0.1375] | 0.0625 | 6.2% | 96.0 | FINISHED | run1 |
| gear (gear.rank=8) | 16.9 | 329.59 KiB | 231.93 KiB | 21.25 [18.50, 21.25] \
| +0.0625 [+0.0525, +0.0750] | 0.0312 | 6.2% | 96.0 | FINISHED | run2 |
"""
LATEX = (
    r"""\begin{tabular}{lrrrrrrrrll}
\toprule
method & KV size \% & stored & accounted & ppl & $\Delta$NLL & KL & flips & tok/s & status & run \\
\midrule
mlx\_quant$\dagger$ & 13.8 & 268.55 KiB & 170.90 KiB & 22.50 [18.50, 21.25] """
    r"""& +0.1250 [+0.1150, +0.1375] & 0.0625 & 6.2\% & 96.0 & FINISHED & run0 \\
\bottomrule
\end{tabular}
% † eval.allow_uncompressed=true: the compressed share may be too small to mean anything
"""
)
CSV = """\
method,kv_size_pct,stored_bytes,accounted_bytes,ppl_token,ppl_token_low,ppl_token_high,\
delta_nll,delta_nll_low,delta_nll_high,kl_mean,top1_flip_rate,k_rel_err,v_rel_err,\
metric,score,score_low,score_high,items,items_total,context_compressed,\
delta_acc,delta_acc_low,delta_acc_high,flips_lost,flips_gained,mcnemar_p,detectable_acc,agreement,\
first_divergence,decode_tok_per_s,status,run_id,model,dataset,eval,accounting_only,allow_uncompressed,key
fp16,100.0,2000000,0,20.0,18.5,21.25,,,,,,,,,,,,,,,,,,,,,,,,96.04,FINISHED,run0,tiny,embedded,decode,False,False,KEY0
gear,13.75,275000,175000,22.5,18.5,21.25,0.125,0.115,0.1375,0.0625,0.0625,,,,,,,,,,,,,,,,,,,96.04,FINISHED,run1,\
tiny,embedded,decode,False,False,KEY1
"""


def view_of(records: list[dict]) -> SweepView:
    return SweepView("parent", {r["key"]: f"run{i}" for i, r in enumerate(records)}, "mlflow ui")


def printed(records: list[dict], *, terminal: bool, view: SweepView | None = None) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    report.print_results(records, view, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_markdown() -> None:
    records = sweep()
    assert report.markdown(records, view_of(records)) == MARKDOWN


def test_latex() -> None:
    records = [finished("mlx_quant", 0.125, eval={"allow_uncompressed": True})]
    assert report.latex(records, view_of(records)) == LATEX


def test_csv() -> None:
    records = [finished("fp16"), finished("gear", 0.125)]
    expected = CSV.replace("KEY0", records[0]["key"]).replace("KEY1", records[1]["key"])
    assert report.csv(records, view_of(records)) == expected


def test_the_frame_has_its_columns_whatever_the_records_hold() -> None:
    for records in (sweep(), [failed()], [finished("fp16")]):
        assert tuple(columns.frame(records).columns) == columns.COLUMNS


def test_the_exact_cache_comes_first_and_the_others_keep_their_order() -> None:
    records = sweep()[::-1]
    assert list(columns.frame(records)["method"]) == [
        "fp16",
        "gear (gear.rank=8)",
        "gear (gear.rank=4)",
    ]


def test_a_protocol_with_a_suffix_is_found() -> None:
    record = finished("fp16")
    old = record["metrics"]
    record["metrics"] = {k.replace("/decode", "/decode-chunk16"): v for k, v in old.items()}
    row = columns.frame([record]).iloc[0]
    assert (row["ppl_token"], row["ppl_token_low"]) == (20.0, 18.5)


def test_without_a_view_rows_are_named_by_key() -> None:
    record = finished()
    text = report.markdown([{**record, "mlflow_run_id": "of a store that may be gone"}])
    assert text.splitlines()[0].endswith("| status | key |")
    assert text.splitlines()[2].endswith(f"| FINISHED | {record['key'][:8]} |")


def test_a_failed_job_is_a_row_and_a_reason() -> None:
    text = report.markdown([*sweep(), failed(settings=GearConfig(bits=4))])
    assert "| gear (gear.bits=4, gear.rank=4) | - | - | - | - | - | - | - | - | FAILED |" in text
    assert text.endswith(
        "Failed:\n\n- gear (gear.bits=4, gear.rank=4): WorkerDied (SIGSEGV): the worker died: exit"
        " status -11; last log line: Fatal Python error: Segmentation fault\n"
    )


def test_a_method_that_only_accounts_for_bytes_is_marked() -> None:
    record = finished("h2o", 0.125)
    record["bytes"]["accounting_only"] = True
    text = report.markdown([record])
    assert "| h2o* |" in text
    assert "\n* bytes are accounted for, not held" in text
    assert "†" not in text


def test_reconstruction_errors_have_columns_where_there_are_any() -> None:
    record = finished("gear", 0.125)
    record["metrics"] |= {"reconstruction/k_rel_err": 0.25, "reconstruction/v_rel_err": 0.5}
    headings, *_, rows, _ = report.markdown([record, finished("kivi", 0.125)]).splitlines()
    assert "| flips | K error | V error | tok/s |" in headings
    assert "| 6.2% | 0.2500 | 0.5000 | 96.0 |" in rows


def task_record(name: str, **metrics: float) -> dict:
    record = finished(name, 0.125, eval={"task": "downstream", "name": "downstream"})
    record["config"]["dataset"] |= {"name": "arc_easy", "metric": "acc_norm"}
    kept = {k: v for k, v in record["metrics"].items() if not k.startswith(("quality", "fidel"))}
    scores = {"quality/acc/arc_easy": 0.9, "quality/acc_norm/arc_easy": 0.5}
    ends = {"quality/acc_norm/arc_easy_low": 0.4, "quality/acc_norm/arc_easy_high": 0.6}
    record["metrics"] = kept | scores | ends | {"data/items": 20, "data/items_total": 80} | metrics
    return record


def test_a_task_has_its_own_columns_and_its_headline_metric() -> None:
    compared = {"delta_acc": -0.1, "flips_lost": 3, "flips_gained": 1, "mcnemar_p": 0.625}
    record = task_record("kivi", **{f"fidelity/{n}": float(v) for n, v in compared.items()})
    record["metrics"]["coverage/context_compressed"] = 0.875
    headings, _, exact, row = report.markdown([task_record("fp16"), record]).splitlines()
    assert "| accounted | metric | score | items | compressed | Δ to fp16 |" in headings
    assert "| acc_norm | 0.500 [0.400, 0.600] | 20 of 80 | 88% | -0.100 | 3 / 1 | 0.625 |" in row
    assert "| acc_norm | 0.500 [0.400, 0.600] | 20 of 80 | - | - | - | - |" in exact
    assert "ppl" not in headings


def test_a_bar_in_a_name_stays_in_its_cell() -> None:
    text = report.markdown([finished("a|b", 0.125)])
    assert "| a\\|b |" in text


def test_piped_output_is_the_markdown_text() -> None:
    records = sweep()
    view = view_of(records)
    text = printed(records, terminal=False, view=view)
    assert text.startswith(report.markdown(records, view))
    assert "\x1b" not in text
    assert text.endswith("MLflow run parent; to look at it:\n  mlflow ui\n")


def test_a_terminal_gets_every_cell_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    records = [*sweep(), failed(settings=GearConfig(bits=4))]
    text = printed(records, terminal=True)
    for row in columns.cells(columns.frame(records)):
        assert all(cell in text for cell in row)
    assert "\x1b[31mFAILED" in text
    assert "FAILED gear (gear.bits=4, gear.rank=4): WorkerDied (SIGSEGV)" in text


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in printed([failed()], terminal=True)
