"""Layer by layer: bytes, mean errors, and the heat maps of heads."""

from __future__ import annotations

import pytest

from evals.figures_layers import JOBS, errors, layers
from tests.evals.fake_records import failed, finished
from tests.evals.fake_samples import error_samples, none, reconstruction, renamed

SAMPLES = error_samples(
    {0: ([0.1, 0.3], [0.5, 0.5]), 1: ([0.2, 0.2], [0.7, 0.5])},
    {0: ([0.2, 0.2], [0.4, 0.6]), 1: ([0.4, 0.2], [0.9, 0.5])},
)


def test_layers_show_bytes_and_errors() -> None:
    drawing = layers(finished("gear", 0.125), SAMPLES)
    assert drawing is not None
    kept, lines = drawing.figure.axes
    heights = [list(stairs.get_data().values) for stairs in kept.patches]
    assert heights == [[1_000_000 / 2**20] * 2, pytest.approx([137_500 / 2**20] * 2)]
    assert lines.get_ylim()[0] == 0.0
    assert [list(line.get_ydata()) for line in lines.lines] == [
        pytest.approx([0.2, 0.25]),
        pytest.approx([0.5, 0.65]),
    ]
    assert drawing.data["stored_bytes"].tolist() == [137_500, 137_500]
    assert drawing.data["v_rel_err"].tolist() == pytest.approx([0.5, 0.65])


def test_a_job_without_layers_has_no_figure() -> None:
    assert layers(failed(), [{"document": "a"}]) is None


def test_every_head_of_k_and_v_is_a_cell() -> None:
    record = reconstruction()
    drawing = errors([record], lambda key: SAMPLES if key == record["key"] else [])
    assert drawing is not None
    k, v, scale = drawing.figure.axes
    assert [axis.get_title() for axis in (k, v)] == ["K of gear", "V of gear"]
    assert k.images[0].get_array().tolist() == [
        pytest.approx([0.15, 0.3]),
        pytest.approx([0.25, 0.2]),
    ]
    assert [axis.images[0].get_clim() for axis in (k, v)] == [(0.0, pytest.approx(0.8))] * 2
    assert scale.get_ylabel() == "relative error"
    rows = drawing.data.to_dict("records")
    found = {(row["side"], row["layer"], row["head"]): row["rel_err"] for row in rows}
    assert found[("v", 1, 0)] == pytest.approx(0.8)
    assert len(found) == 8


def test_layers_may_have_different_numbers_of_heads() -> None:
    samples = error_samples({0: ([0.1], [0.2]), 1: ([0.3, 0.4], [0.5, 0.6])})
    drawing = errors([reconstruction()], lambda _: samples)
    assert drawing is not None
    assert drawing.figure.axes[0].images[0].get_array().mask.tolist() == [
        [False, False],
        [True, False],
    ]


def test_more_jobs_than_fit_are_said_to_be_more() -> None:
    records = [renamed(reconstruction("kivi"), f"method{i:02}") for i in range(JOBS + 1)]
    drawing = errors(records, lambda _: SAMPLES)
    assert drawing is not None
    assert drawing.data["method"].nunique() == JOBS + 1
    assert drawing.figure.get_suptitle() == f"the first {JOBS} of {JOBS + 1} jobs; the CSV has all"


def test_other_tasks_have_no_errors() -> None:
    assert errors([finished("gear"), failed()], lambda _: SAMPLES) is None
    assert errors([reconstruction()], none) is None
