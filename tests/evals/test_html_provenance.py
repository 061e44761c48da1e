"""Guards, environment and reproduction as a report shows them."""

from __future__ import annotations

from evals.html_provenance import environment, guards, reproduce, table
from tests.evals.fake_records import failed, finished, sweep


def test_cells_are_escaped_and_failures_stand_out() -> None:
    text = table([["a&b"], ["<i>"], ["failed: 0 tokens"]])
    assert "<th>a&amp;b</th>" in text
    assert "<td>&lt;i&gt;</td>" in text
    assert '<td class="failed">failed: 0 tokens</td>' in text


def test_guards_have_a_row_a_job_and_a_column_each() -> None:
    record = finished("gear")
    record["guards"] = {"finite": "passed", "cache_class": "not_applicable"}
    text = guards([finished("fp16"), record, failed("kivi")])
    assert "<th>metrics finite</th><th>finite</th><th>cache_class</th>" in text
    assert "<td>gear</td><td>-</td><td>passed</td><td>not applicable</td>" in text
    assert guards([failed()]) == ""


def test_the_environment_is_one_row_where_all_agree() -> None:
    first, second = finished("fp16"), finished("gear")
    first["environment"] = {"python": "3.11.7", "git": {"commit": "abc", "dirty": True}}
    second["environment"] = {"python": "3.12.1", "versions": {"mlx": "0.32.4"}, "git": None}
    text = environment([first, second])
    assert "<td>seed</td><td>0</td>" in text
    assert f"<td>python</td><td>3.11.7 ({first['key'][:8]})</td>" in text
    assert f"<td>python</td><td>3.12.1 ({second['key'][:8]})</td>" in text
    assert f"<td>mlx</td><td>- ({first['key'][:8]})</td>" in text
    assert "abc with uncommitted changes" in text
    assert "not in a git checkout" in text
    assert "cd" * 32 in text  # the hash of the data


def test_each_job_can_be_run_again() -> None:
    records = sweep()
    text = reproduce(records, ["gear.rank=4,8", "-m"])
    assert "<pre>python run.py gear.rank=4,8 -m</pre>" in text
    for record in records:
        assert f"<td>python scripts/reproduce.py {record['key']}</td>" in text
    assert "run alone" not in text
    told = {**records[1], "words": ["cache=gear", "gear.rank=4"]}
    assert "<td>python run.py cache=gear gear.rank=4</td>" in reproduce([records[0], told], None)
