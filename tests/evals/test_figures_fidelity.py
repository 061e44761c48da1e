"""KL by position: bins, means, intervals."""

from __future__ import annotations

import numpy as np
import pytest

from evals.figures_fidelity import BINS, kl_by_position
from tests.evals.fake_records import failed, finished
from tests.evals.fake_samples import kl_samples, none, reconstruction


def test_the_numbers_are_means_over_windows_and_tokens_of_a_bin() -> None:
    first, second = np.linspace(0.1, 0.5, 40), np.linspace(0.3, 0.1, 40)
    samples = kl_samples(("a", first.tolist()), ("b", second.tolist()))
    record = finished("gear", 0.125)
    drawing = kl_by_position([record], lambda key: samples if key == record["key"] else [])
    assert drawing is not None
    rows = drawing.data.to_dict("records")
    assert len(rows) <= BINS
    assert (rows[0]["first_token"], rows[-1]["last_token"]) == (1, 40)
    for row in rows:
        part = slice(row["first_token"] - 1, row["last_token"])
        assert row["kl_mean"] == pytest.approx((first[part].mean() + second[part].mean()) / 2)
        # of two documents the bootstrap's ends are the documents themselves
        ends = sorted([first[part].mean(), second[part].mean()])
        assert [row["kl_low"], row["kl_high"]] == pytest.approx(ends)
        assert (row["windows"], row["key"]) == (2, record["key"])
    (line,) = drawing.figure.axes[0].lines
    assert list(line.get_ydata()) == [row["kl_mean"] for row in rows]


def test_windows_of_one_document_have_no_interval() -> None:
    samples = kl_samples(("a", [0.1, 0.2]), ("a", [0.3, 0.4]))
    drawing = kl_by_position([finished("gear")], lambda _: samples)
    assert drawing is not None
    assert drawing.data["kl_mean"].tolist() == pytest.approx([0.2, 0.3])
    assert drawing.data["kl_low"].isna().all()


def test_a_shorter_window_counts_where_it_has_tokens() -> None:
    samples = kl_samples(("a", [0.1, 0.2]), ("b", [0.3]))
    drawing = kl_by_position([finished("gear")], lambda _: samples)
    assert drawing is not None
    assert drawing.data["kl_mean"].tolist() == pytest.approx([0.2, 0.2])


def test_values_far_apart_are_drawn_on_a_log_scale() -> None:
    values = {"gear": [0.001, 0.002], "kivi": [0.5, 0.6]}
    records = {record["key"]: record for record in map(finished, values)}
    drawing = kl_by_position(
        list(records.values()),
        lambda key: kl_samples(("a", values[records[key]["config"]["cache"]["name"]])),
    )
    assert drawing is not None
    assert drawing.figure.axes[0].get_yscale() == "log"


def test_fp16_and_other_tasks_have_no_line() -> None:
    samples = kl_samples(("a", [0.0, 0.0]))
    assert kl_by_position([finished("fp16"), reconstruction(), failed()], lambda _: samples) is None
    assert kl_by_position([finished("gear")], none) is None
