"""Rank and sparsity curves: which records make a line, and what is on it."""

from __future__ import annotations

from dataclasses import replace

from evals.figures_settings import rank, sparsity
from gear.config import GearConfig, SideConfig
from tests.evals.fake_records import Record, failed, finished, sweep
from tests.evals.fake_samples import reconstruction

GEAR = GearConfig()


def _ranked(rank: int, quality: float, **settings: object) -> Record:
    return finished("gear", quality, settings=replace(GEAR, rank=rank, **settings))


def test_a_line_is_one_setting_varied_and_all_others_fixed() -> None:
    records = [_ranked(8, 0.05), _ranked(2, 0.2), _ranked(8, 0.01, bits=4), _ranked(2, 0.1, bits=4)]
    drawing = rank(records)
    assert drawing is not None
    nll, kl = drawing.figure.axes
    assert [axis.get_ylabel() for axis in (nll, kl)] == [
        "ΔNLL (nats per token)",
        "KL from fp16 (nats per token)",
    ]
    lines = {line.get_label(): line for line in nll.lines if not line.get_label().startswith("_")}
    assert list(lines) == ["gear (bits=2)", "gear (bits=4)"]
    assert [list(line.get_xdata()) for line in lines.values()] == [[2.0, 8.0]] * 2
    assert [list(line.get_ydata()) for line in lines.values()] == [[0.2, 0.05], [0.1, 0.01]]


def test_the_numbers_are_those_of_the_records() -> None:
    records = {record["key"]: record for record in (_ranked(2, 0.2), _ranked(8, 0.05))}
    drawing = rank([finished("fp16"), *records.values()])
    assert drawing is not None
    rows = drawing.data.to_dict("records")
    assert len(rows) == 4
    for row in rows:
        record = records[row["key"]]
        assert row["value"] == record["metrics"][row["metric"]]
        assert row["rank"] == record["config"]["cache"]["layers"][0]["k"]["rank"]
    assert {row["low"] for row in rows if row["metric"] == "fidelity/delta_nll"} == {
        record["metrics"]["fidelity/delta_nll_low"] for record in records.values()
    }


def test_sparsity_has_a_curve_of_its_own() -> None:
    few, many = (
        finished("gear", quality, settings=replace(GEAR, sparse_frac=frac))
        for quality, frac in ((0.25, 0.01), (0.125, 0.05))
    )
    drawing = sparsity([few, many])
    assert drawing is not None
    assert drawing.data["sparse_frac"].tolist() == [0.01, 0.01, 0.05, 0.05]
    assert drawing.figure.axes[0].get_xlabel() == "gear.sparse_frac"
    assert rank([few, many]) is None


def test_reconstruction_errors_are_drawn_where_they_are_what_was_measured() -> None:
    records = [reconstruction(settings=replace(GEAR, rank=r)) for r in (2, 8)]
    drawing = rank(records)
    assert drawing is not None
    names = [axis.get_ylabel() for axis in drawing.figure.axes]
    assert names == ["relative error of K", "relative error of V"]


def test_a_rank_that_differs_between_k_and_v_has_no_place_on_the_axis() -> None:
    split = replace(GEAR, k=SideConfig(rank=2), v=SideConfig(rank=8))
    assert rank([finished("gear", settings=split), _ranked(4, 0.1)]) is None


def test_a_single_value_is_no_curve() -> None:
    assert sparsity(sweep()) is None
    assert rank([sweep()[1], failed(settings=replace(GEAR, rank=8))]) is None
