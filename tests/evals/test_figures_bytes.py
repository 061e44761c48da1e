"""Bytes by term: the bars and the numbers behind them."""

from __future__ import annotations

import pytest

from evals.figures_bytes import bytes_by_term
from tests.evals.fake_records import failed, finished


def test_bars_stack_the_terms_of_each_method() -> None:
    gear, kivi = finished("gear", 0.125), finished("kivi", 0.25)
    gear["bytes"]["terms"] = {"codes": 200_000, "scales": 50_000, "lowrank": 25_000, "exact": 0}
    drawing = bytes_by_term([finished("fp16"), gear, kivi])
    assert drawing is not None
    (axis,) = drawing.figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["gear", "kivi"]
    first = [bar for bar in axis.patches if bar.get_y() < 0]
    assert [bar.get_width() for bar in first] == pytest.approx([10.0, 2.5, 1.25])
    assert [bar.get_x() for bar in first] == pytest.approx([0.0, 10.0, 12.5])
    assert [text.get_text().strip() for text in axis.texts] == [
        "13.8% · 0.26 MiB",
        "7.5% · 0.14 MiB",
    ]
    names = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert names == ["codes", "scales", "low rank"]  # nothing waits exact: not in the legend


def test_the_numbers_are_those_of_the_records() -> None:
    gear = finished("gear", 0.125)
    gear["bytes"]["terms"] = {"codes": 200_000, "exact": 75_000}
    drawing = bytes_by_term([gear])
    assert drawing is not None
    rows = drawing.data.to_dict("records")
    assert {row["term"]: row["bytes"] for row in rows} == gear["bytes"]["terms"]
    assert [row["pct_of_fp16"] for row in rows] == [10.0, 3.75]
    assert {row["key"] for row in rows} == {gear["key"]}


def test_bytes_that_are_not_held_are_marked() -> None:
    record = finished("gear", 0.125)
    record["bytes"]["accounting_only"] = True
    drawing = bytes_by_term([record])
    assert drawing is not None
    axis = drawing.figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["gear*"]
    assert "accounted for, not held" in axis.get_xlabel()


def test_without_terms_there_is_nothing_to_draw() -> None:
    bare = finished("gear")
    del bare["bytes"]
    assert bytes_by_term([finished("fp16"), failed(), bare]) is None
