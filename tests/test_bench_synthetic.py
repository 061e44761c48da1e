"""scripts/bench_synthetic.py on a tiny synthetic block: order of errors, bytes, its statement."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from gear.bytes import block_bytes

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "bench_synthetic.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module, at 2 heads of 160 tokens and 64 channels."""
    spec = importlib.util.spec_from_file_location("bench_synthetic", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["SHAPE"] = (2, 160, 64)
    return module


@pytest.fixture(scope="module")
def found(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench") / "results.json"
    assert bench.main(["--no-model", "--out", str(out)]) == 0
    return json.loads(out.read_text(encoding="utf-8"))


def test_every_preset_side_and_block_is_measured(bench: ModuleType, found: dict[str, Any]) -> None:
    seen = {(r["data"], r["preset"], r["side"], r["block"]) for r in found["rows"]}
    assert len(seen) == len(found["rows"]) == 2 * len(bench.PRESETS) * 2 * 2
    assert found["real"] == "skipped: --no-model"
    assert {"versions", "device", "blas"} <= found["environment"].keys()


def test_the_terms_lower_the_error(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        error = {name: v["rel_err"] for name, v in row["variants"].items()}
        assert error["all"] <= error["base"], row
        assert error["base+L·R"] <= error["base"], row
        recovery = 1 - (error["all"] / error["base"]) ** 2
        assert row["variants"]["all"]["recovery"] == pytest.approx(recovery, abs=1e-4)
    assert max(row["variants"]["all"]["recovery"] for row in found["rows"]) > 0.5


def test_bytes_are_those_of_gear_bytes_and_of_the_arrays(
    bench: ModuleType, found: dict[str, Any]
) -> None:
    for row in found["rows"]:
        layer, (_, heads, tokens, head_dim) = bench.preset(row["preset"]), row["shape"]
        own = layer.k if row["side"] == "k" else layer.v
        for name, variant in row["variants"].items():
            settings = own if name in ("base+S", "all") else replace(own, sparse_frac=0)
            rank = row["rank"] if name in ("base+L·R", "all") else 0
            size = block_bytes(
                row["side"], settings, layer.outlier_stage, heads, tokens, head_dim, rank
            )
            assert variant["accounted_bytes"] == variant["held_bytes"] == size
        assert sum(row["term_bytes"].values()) == row["variants"]["all"]["accounted_bytes"]


def test_the_statement_is_computed_from_the_rows(bench: ModuleType, found: dict[str, Any]) -> None:
    assert "is not low-rank" in found["low_rank"]["statement"]
    rows = json.loads(json.dumps(found["rows"]))
    for row in rows:
        row["variants"]["all"]["rel_err"] = 0.1 * row["variants"]["base+S"]["rel_err"]
    low_rank = bench.low_rank_shares(rows)
    assert low_rank["energy_share"]["synthetic K"] == pytest.approx(0.99)
    assert "is low-rank" in low_rank["statement"]
    assert "99.0% (90.0%)" in low_rank["statement"]


def test_two_runs_agree(bench: ModuleType, found: dict[str, Any]) -> None:
    again = json.loads(bench.as_json(bench.results(with_model=False)))
    assert again == found


def test_an_absent_model_is_a_clear_line(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("GEAR_ASSETS", str(tmp_path / "none"))
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path / "mlruns"))
    found = bench.results(with_model=True)
    assert found["real"].startswith("skipped: no bundled model")
    assert all(row["data"].startswith("synthetic") for row in found["rows"])
    assert "GEAR_ASSETS" in capsys.readouterr().err


def test_relative_error_is_the_frobenius_ratio(bench: ModuleType) -> None:
    assert bench.relative_error(mx.array([3.0, 4.0]), mx.array([3.0, 3.0])) == pytest.approx(0.2)
