"""Needle and passkey heat maps."""

from __future__ import annotations

import pytest

from evals.figures_retrieval import retrieval
from tests.evals.fake_records import finished
from tests.evals.fake_samples import asked, none, retrieved


def test_there_is_a_cell_for_every_length_and_depth() -> None:
    samples = retrieved(512, 0.0, 1.0) + retrieved(512, 0.5, 1.0, 0.0, 0.0)
    samples += retrieved(2048, 0.5, 0.0)
    drawing = retrieval([asked([512, 2048], [0.0, 0.5])], lambda _: samples)
    assert drawing is not None
    axis, scale = drawing.figure.axes
    assert {text.get_position(): text.get_text() for text in axis.texts} == {
        (0, 0): "1.00\nn=1",
        (1, 0): "not\nmeasured",
        (0, 1): "0.33\nn=3",
        (1, 1): "0.00\nn=1",
    }
    (image,) = axis.images
    assert image.get_clim() == (0, 1)
    assert image.get_array().mask.tolist() == [[False, True], [False, False]]
    assert [patch.get_hatch() for patch in axis.patches] == ["//"]
    assert axis.patches[0].get_xy() == (0.5, -0.5)
    assert [label.get_text() for label in axis.get_xticklabels()] == ["512", "2,048"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["0", "0.5"]
    assert axis.get_title() == "tiny · passkey · gear"
    assert scale.get_ylabel() == "accuracy"


def test_the_numbers_name_every_cell() -> None:
    drawing = retrieval([asked([512, 2048], [0.5])], lambda _: retrieved(512, 0.5, 1.0, 0.0, 0.0))
    assert drawing is not None
    measured, missing = drawing.data.to_dict("records")
    assert (measured["length"], measured["depth"], measured["items"]) == (512, 0.5, 3)
    assert measured["accuracy"] == pytest.approx(1 / 3)
    assert (missing["length"], missing["items"]) == (2048, 0)
    assert missing["accuracy"] != missing["accuracy"]


def test_text_in_cells_stands_out_from_them() -> None:
    samples = retrieved(1, 0.0, 1.0) + retrieved(2, 0.0, 0.0)
    drawing = retrieval([asked([1], [0.0])], lambda _: samples)
    assert drawing is not None
    assert [text.get_color() for text in drawing.figure.axes[0].texts] == ["black", "white"]


def test_retrieval_without_a_depth_is_one_row() -> None:
    drawing = retrieval([asked([512], None)], lambda _: retrieved(512, None, 1.0, 0.0))
    assert drawing is not None
    axis = drawing.figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["any"]
    assert [text.get_text() for text in axis.texts] == ["0.50\nn=2"]


def test_each_job_of_a_sweep_has_a_panel() -> None:
    records = [asked([512], [0.0], cache) for cache in ("fp16", "kivi", "gear", "gear_l")]
    drawing = retrieval(records, lambda _: retrieved(512, 0.0, 1.0))
    assert drawing is not None
    titles = [axis.get_title() for axis in drawing.figure.axes if axis.get_title()]
    assert titles == [f"tiny · passkey · {name}" for name in ("fp16", "kivi", "gear", "gear_l")]
    assert drawing.data["method"].tolist() == ["fp16", "kivi", "gear", "gear_l"]


def test_other_tasks_have_no_cells() -> None:
    samples = [{"scores": {"acc": 1.0}}, {"document": "a"}]
    assert retrieval([finished("gear")], lambda _: retrieved(512, 0.0, 1.0)) is None
    assert retrieval([asked([512], [0.0])], lambda _: samples) is None
    assert retrieval([asked([512], [0.0])], none) is None
