"""scripts/compare_veloxquant.py: its numbers against NumPy, its table, its notes for every method.

What measures veloxquant-mlx is skipped without the package; everything else runs.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))  # as Python does for `python scripts/compare_veloxquant.py`

import compare_veloxquant  # noqa: E402
from comparison import data, found, notes, ours, pairs, report, theirs  # noqa: E402

from gear.methods import METHODS  # noqa: E402

needs_theirs = pytest.mark.skipif(
    find_spec("veloxquant_mlx") is None, reason="pip install veloxquant-mlx"
)
FOUND = found.Found(0.5, None, 2.25, None, 3.0)


def _pair(method: str, setting: str) -> pairs.Pair:
    return next(p for p in pairs.pairs() if (p.method, p.setting) == (method, setting))


def _found_here(method: str, setting: str, sample: data.Sample) -> found.Found:
    pair = _pair(method, setting)
    return ours.measure(pair.method, pair.options, pair.gear, sample)


def test_every_method_has_a_note_or_is_not_theirs_and_every_pair_has_a_note() -> None:
    assert METHODS.keys() <= notes.WHY.keys() | notes.NOT_THEIRS.keys()
    assert not notes.WHY.keys() & notes.NOT_THEIRS.keys()
    assert {pair.method for pair in pairs.pairs()} == notes.WHY.keys()
    keys = [(pair.method, pair.setting) for pair in pairs.pairs()]
    assert len(keys) == len(set(keys))


def test_arrays_are_counted_once_a_buffer_and_wherever_they_lie() -> None:
    class Thing:
        def __init__(self) -> None:
            self.keys = mx.zeros((4, 8), mx.float16)  # 64 bytes
            self.again = [self.keys, {"view": self.keys.reshape(8, 4)}]
            self.codes, self.own = np.zeros(10, np.uint8), self  # 10 bytes, and a circle

    mx.eval(thing := Thing().__dict__)
    assert found.held_bytes(thing) == 74


def test_errors_are_of_the_whole_and_dropped_tokens_count_as_zeros() -> None:
    x = np.random.default_rng(1).normal(size=(1, 2, 6, 4)).astype(np.float32)
    made = x + np.float32(0.25)
    expected = 0.25 * np.sqrt(x.size) / np.linalg.norm(x)
    assert found.relative_error(mx.array(x), mx.array(made)) == pytest.approx(expected, 1e-6)
    zeroed = x.copy()
    zeroed[:, :, 2:] = 0
    lost = found.lost_share(mx.array(x), mx.array(x[:, :, :2]))
    assert lost == pytest.approx(np.linalg.norm(x - zeroed) / np.linalg.norm(x), rel=1e-6)


def test_a_mean_keeps_what_a_package_does_not_have() -> None:
    rows = [FOUND, found.Found(0.1, None, 2.75, None, 4.0)]
    assert found.mean(rows) == found.Found(pytest.approx(0.3), None, 2.5, None, 3.5)


def test_ours_is_measured_as_a_plain_grid_says() -> None:
    sample = data.gaussian(128)
    x = np.array(sample.exact[0], dtype=np.float64)
    groups = x.reshape(1, data.HEADS, 4, 32, data.HEAD_DIM)
    low, high = groups.min(axis=3, keepdims=True), groups.max(axis=3, keepdims=True)
    step = (high - low) / 3
    rebuilt = (np.round((groups - low) / step) * step + low).reshape(x.shape)
    expected = np.linalg.norm(rebuilt - x) / np.linalg.norm(x)
    row = _found_here("kivi", "2 bits", sample)
    assert row.k_error == pytest.approx(expected, rel=2e-3)
    assert (row.k_bits, row.v_bits, row.held_bits) == (3, 3, 3)  # 2, and 32 bits a group of 32


def test_fitted_coded_and_evicting_methods_are_measured_too() -> None:
    sample = data.gaussian(pairs.TOKENS)
    fitted = _found_here("vecinfer", "8 bits for 4 of K, 8 of V", sample)
    assert (fitted.k_bits, fitted.v_bits) == (2, 1)
    assert 0.1 < (fitted.k_error or 0) < 0.3  # on another draw of the same law
    evicted = _found_here("nestedkv", "320 tokens a head", sample)
    assert evicted.k_bits == 4 + 16 / (4 * 2 * 64)  # a quarter of fp16, and a position a token
    plain, coded = (_found_here("cachegen", f"4 bits{kind}", sample) for kind in ("", ", coded"))
    assert coded.k_error == plain.k_error
    assert (coded.k_bits or 9) < (plain.k_bits or 0)


def test_the_table_has_a_cell_for_every_column_and_the_error_of_what_cannot_run() -> None:
    row = report.Row("gaussian", "kivi", "2 bits", FOUND, "ValueError: a | b\nc")
    cells = report.cells(row)
    assert len(cells) == len(report.COLUMNS)
    assert cells[:7] == ["gaussian", "kivi", "2 bits", "0.5000", "ValueError: a | b\nc", "-", ""]
    page = report.as_markdown([row], {"mlx": "1"})
    assert "| gaussian | kivi | 2 bits | 0.5000 | ValueError: a / b c | - |" in page
    assert notes.WHY["kivi"] in page
    assert notes.WHY["gear"] not in page
    whole = json.loads(report.as_json([row], {"mlx": "1"}))
    assert whole["rows"][0]["ours"]["k_bits"] == 2.25
    assert whole["rows"][0]["theirs"].startswith("ValueError")
    assert set(whole["why"]) == {"all", "kivi"}


def test_what_raises_becomes_its_text() -> None:
    def fails(_sample: Any) -> found.Found:
        raise ValueError("no such bits")

    assert compare_veloxquant._tried(fails, [None]) == "ValueError: no such bits"


def test_a_missing_package_and_an_unknown_method_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "veloxquant_mlx", None)
    assert compare_veloxquant.main(["--method", "kivi"]) == 1
    assert f"pip install veloxquant-mlx=={theirs.TESTED}" in capsys.readouterr().err
    assert compare_veloxquant.main(["--method", "kivy"]) == 2
    assert "kivy: must be among kivi" in capsys.readouterr().err


@needs_theirs
def test_both_kivis_agree_and_theirs_holds_fp16(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert compare_veloxquant.main(["--method", "kivi", "--json", str(out)]) == 0
    for row in json.loads(out.read_text(encoding="utf-8"))["rows"]:
        mine, other = row["ours"], row["theirs"]
        for name in ("k_error", "v_error", "k_bits", "v_bits"):
            assert mine[name] == pytest.approx(other[name], rel=5e-3)
        assert other["held_bits"] == 16
