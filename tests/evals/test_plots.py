"""Figures: what they draw from records, that they repeat, and that nothing to draw is None."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals import plots
from tests.evals.fake_records import failed, finished, sweep


def test_pareto_draws_each_method_at_its_bytes_and_quality(tmp_path: Path) -> None:
    figure = plots.pareto(sweep())
    assert figure is not None
    (axis,) = figure.axes
    assert axis.get_title() == "tiny · embedded · decode"
    assert [text.get_text() for text in axis.texts] == [
        "fp16",
        "gear (gear.rank=4)",
        "gear (gear.rank=8)",
    ]
    points = [tuple(text.xy) for text in axis.texts]
    assert points == [(2_000_000 / 2**20, 0.0), (275_000 / 2**20, 0.125), (337_500 / 2**20, 0.0625)]
    plots.save(figure, tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_the_front_leaves_out_what_is_beaten_in_both() -> None:
    beaten = finished("kivi", 0.25)
    beaten["metrics"]["kv/stored_bytes"] = 1_000_000
    figure = plots.pareto([*sweep(), beaten])
    assert figure is not None
    front = figure.axes[0].lines[0]
    assert list(front.get_ydata()) == [0.125, 0.0625, 0.0]
    assert list(front.get_xdata()) == pytest.approx(
        [275_000 / 2**20, 337_500 / 2**20, 2_000_000 / 2**20]
    )


def test_perplexity_is_the_quality_where_nothing_is_compared() -> None:
    figure = plots.pareto([finished("fp16")])
    assert figure is not None
    assert figure.axes[0].get_ylabel() == "token perplexity"
    assert figure.axes[0].texts[0].xy[1] == 20.0


def test_models_have_a_panel_each() -> None:
    figure = plots.pareto(
        [finished("gear", 0.125), finished("gear", 0.25, model={"name": "other"})]
    )
    assert figure is not None
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["tiny · embedded · decode", "other · embedded · decode"]


def test_an_interval_that_misses_its_estimate_is_drawn() -> None:
    record = finished("gear", 0.125)
    record["metrics"]["fidelity/delta_nll_low"] = 0.2
    assert plots.pareto([record]) is not None


def test_failed_jobs_are_not_points() -> None:
    guarded = {**finished("gear", 0.125), "status": "FAILED"}
    assert plots.pareto([failed(), guarded]) is None


def test_layers_show_bytes_and_errors() -> None:
    samples = [
        {"layers": [{"layer": 0, "k_rel_err": [0.1, 0.3], "v_rel_err": [0.5, 0.5]}]},
        {"layers": [{"layer": 0, "k_rel_err": [0.2, 0.2], "v_rel_err": [0.4, 0.6]}]},
    ]
    figure = plots.per_layer(finished("gear", 0.125), samples)
    assert figure is not None
    kept, errors = figure.axes
    heights = [list(stairs.get_data().values) for stairs in kept.patches]
    assert heights == [[1_000_000 / 2**20] * 2, pytest.approx([137_500 / 2**20] * 2)]
    low, high = errors.get_ylim()
    assert low == 0.0
    assert high > 0.5
    assert [list(line.get_ydata()) for line in errors.lines] == [pytest.approx([0.2]), [0.5]]


def test_a_job_without_layers_has_no_figure() -> None:
    assert plots.per_layer(failed(), [{"document": "a"}]) is None


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        figure = plots.pareto(sweep())
        assert figure is not None
        plots.save(figure, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def _retrieved(length: int, depth: float | None, *right: float) -> list[plots.Record]:
    """Return samples of one cell."""
    return [{"length": length, "depth": depth, "scores": {"acc": value}} for value in right]


def _asked(lengths: list[int], depths: list[float] | None) -> plots.Record:
    dataset = {"name": "passkey", "lengths": lengths, "depths": depths}
    return finished("gear", dataset=dataset)


def test_retrieval_has_a_cell_for_every_length_and_depth(tmp_path: Path) -> None:
    samples = _retrieved(512, 0.0, 1.0) + _retrieved(512, 0.5, 1.0, 0.0, 0.0)
    samples += _retrieved(2048, 0.5, 0.0)
    figure = plots.retrieval(_asked([512, 2048], [0.0, 0.5]), samples)
    assert figure is not None
    axis, scale = figure.axes
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
    plots.save(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_figures_in_cells_stand_out_from_them() -> None:
    figure = plots.retrieval(_asked([1], [0.0]), _retrieved(1, 0.0, 1.0) + _retrieved(2, 0.0, 0.0))
    assert figure is not None
    assert [text.get_color() for text in figure.axes[0].texts] == ["black", "white"]


def test_retrieval_without_a_depth_is_one_row() -> None:
    figure = plots.retrieval(_asked([512], None), _retrieved(512, None, 1.0, 0.0))
    assert figure is not None
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["any"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.50\nn=2"]


def test_samples_of_other_tasks_have_no_cells() -> None:
    assert plots.retrieval(finished("gear"), [{"scores": {"acc": 1.0}}, {"document": "a"}]) is None
