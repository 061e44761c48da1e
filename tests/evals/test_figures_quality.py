"""The Pareto figure: points, front, intervals and names."""

from __future__ import annotations

from itertools import combinations

import pytest

from evals.figures_quality import KEYED, pareto
from evals.record import FINISHED
from tests.evals.fake_records import failed, finished, sweep
from tests.evals.fake_samples import renamed, scored


def test_each_method_is_at_its_bytes_and_quality() -> None:
    drawing = pareto(sweep())
    assert drawing is not None
    (axis,) = drawing.figure.axes
    assert axis.get_title() == "tiny · embedded · decode"
    names = ["fp16", "gear (rank=4)", "gear (rank=8)"]
    assert [text.get_text() for text in axis.texts] == names
    points = [tuple(text.xy) for text in axis.texts]
    assert points == [(2_000_000 / 2**20, 0.0), (275_000 / 2**20, 0.125), (337_500 / 2**20, 0.0625)]
    assert axis.get_ylabel() == "ΔNLL (nats per token), lower is better"


def test_the_numbers_are_those_of_the_records() -> None:
    records = sweep()
    drawing = pareto(records)
    assert drawing is not None
    for row, record in zip(drawing.data.to_dict("records")[1:], records[1:], strict=True):
        metrics = record["metrics"]
        assert row["key"] == record["key"]
        assert row["stored_bytes"] == metrics["kv/stored_bytes"]
        assert row["quality"] == "delta_nll"
        assert row["value"] == metrics["fidelity/delta_nll"]
        assert row["value_low"] == metrics["fidelity/delta_nll_low"]
        assert row["value_high"] == metrics["fidelity/delta_nll_high"]


def test_the_front_leaves_out_what_is_beaten_in_both() -> None:
    beaten = finished("kivi", 0.25)
    beaten["metrics"]["kv/stored_bytes"] = 1_000_000
    drawing = pareto([*sweep(), beaten])
    assert drawing is not None
    front = drawing.figure.axes[0].lines[0]
    assert list(front.get_ydata()) == [0.125, 0.0625, 0.0]
    assert list(front.get_xdata()) == pytest.approx(
        [275_000 / 2**20, 337_500 / 2**20, 2_000_000 / 2**20]
    )
    assert drawing.data.set_index("method")["on_front"].to_dict() == {
        "fp16": True,
        "gear (gear.rank=4)": True,
        "gear (gear.rank=8)": True,
        "kivi": False,
    }


def test_of_a_score_the_higher_one_is_better() -> None:
    records = [scored("fp16", 0.6, 2_000_000), scored("kivi", 0.3, 400_000)]
    drawing = pareto([*records, scored("gear", 0.5, 500_000), scored("gear_l", 0.25, 600_000)])
    assert drawing is not None
    assert drawing.figure.axes[0].get_ylabel() == "acc, higher is better"
    front = drawing.figure.axes[0].lines[0]
    assert list(front.get_ydata()) == [0.3, 0.5, 0.6]
    assert list(drawing.data["on_front"]) == [True, True, True, False]
    assert list(drawing.data["value_high"]) == pytest.approx([0.7, 0.4, 0.6, 0.35])


def test_perplexity_is_the_quality_where_nothing_is_compared() -> None:
    drawing = pareto([finished("fp16")])
    assert drawing is not None
    assert drawing.figure.axes[0].get_ylabel() == "token perplexity, lower is better"
    assert drawing.data["value"].tolist() == [20.0]


def test_models_have_a_panel_each() -> None:
    other = finished("gear", 0.25, model={"name": "other"})
    drawing = pareto([finished("gear", 0.125), other])
    assert drawing is not None
    titles = [axis.get_title() for axis in drawing.figure.axes]
    assert titles == ["tiny · embedded · decode", "other · embedded · decode"]
    assert drawing.data["model"].tolist() == ["tiny", "other"]


def test_an_interval_that_misses_its_estimate_is_drawn() -> None:
    record = finished("gear", 0.125)
    record["metrics"]["fidelity/delta_nll_low"] = 0.2
    assert pareto([record]) is not None


def test_failed_jobs_are_not_points() -> None:
    guarded = {**finished("gear", 0.125), "status": "FAILED"}
    assert pareto([failed(), guarded]) is None
    assert finished()["status"] == FINISHED


def test_many_methods_are_numbered_with_a_key() -> None:
    records = [renamed(finished("kivi", i / 100), f"method{i}") for i in range(12)]
    drawing = pareto(records)
    assert drawing is not None
    texts = [text.get_text() for text in drawing.figure.axes[0].texts]
    assert texts == [str(i) for i in range(1, 13)]
    (key,) = drawing.figure.legends
    assert [t.get_text() for t in key.get_texts()] == [f"{i + 1}  method{i}" for i in range(12)]


@pytest.mark.parametrize("beaten", [True, False])
def test_of_hundreds_of_methods_some_of_the_front_are_named(beaten: bool) -> None:
    records = [renamed(finished("kivi", 0.1 + i / 1000), f"method{i}") for i in range(KEYED + 5)]
    if beaten:  # all but the first: of equal bytes
        best = records[0]["metrics"]
        records = [{**r, "metrics": best | _worse(i)} for i, r in enumerate(records)]
    drawing = pareto(records)
    assert drawing is not None
    assert len(drawing.data) == KEYED + 5
    texts = drawing.figure.axes[0].texts
    assert len(texts) == (1 if beaten else KEYED)
    assert len(drawing.figure.legends[0].get_texts()) == len(texts)


def _worse(i: int) -> dict[str, float]:
    """Return a quality that falls with ``i``."""
    return {"fidelity/delta_nll": 0.1 + i}


def test_names_of_close_points_do_not_cover_each_other() -> None:
    records = [renamed(finished("kivi", 0.1 + i / 1000), f"method_{i}") for i in range(5)]
    drawing = pareto([*records, finished("fp16")])
    assert drawing is not None
    boxes = [text.get_window_extent() for text in drawing.figure.axes[0].texts]
    assert len(boxes) == 6
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
