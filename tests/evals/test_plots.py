"""All figures together: which there are, that they repeat, and that names are drawn as written."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from evals import plots
from evals.drawing import COLOURS, short
from tests.evals.fake_records import Record, failed, finished, sweep
from tests.evals.fake_samples import (
    HOSTILE,
    asked,
    error_samples,
    kl_samples,
    none,
    reconstruction,
    renamed,
    retrieved,
)

ROOT = Path(__file__).parents[2]


def _all() -> tuple[list[Record], dict[str, list[Record]]]:
    """Return records of every kind with their samples by key."""
    fidelity, rebuilt, found = sweep(), reconstruction("kivi"), asked([512], [0.0])
    samples = {record["key"]: kl_samples(("a", [0.25, 0.5])) for record in fidelity}
    samples[rebuilt["key"]] = error_samples({0: ([0.25], [0.5])})
    samples[found["key"]] = retrieved(512, 0.0, 1.0)
    return [*fidelity, rebuilt, found], samples


def test_a_sweep_has_the_figures_that_its_records_give() -> None:
    records, samples = _all()
    drawn = plots.of_sweep(records, samples.__getitem__)
    assert list(drawn) == [
        "pareto", "rank", "bytes_by_term", "kl_by_position", "errors", "retrieval",
    ]  # fmt: skip
    assert set(drawn) < set(plots.CAPTIONS)
    assert list(plots.of_sweep(sweep(), none)) == ["pareto", "rank", "bytes_by_term"]
    assert plots.of_sweep([failed()], none) == {}
    assert plots.of_sweep([], none) == {}


def test_a_job_has_the_figures_of_its_task() -> None:
    fidelity, rebuilt = finished("gear", 0.125), reconstruction()
    assert list(plots.of_job(fidelity, kl_samples(("a", [0.5])))) == ["layers", "kl_by_position"]
    assert list(plots.of_job(rebuilt, error_samples({0: ([0.25], [0.5])}))) == ["layers", "errors"]
    assert list(plots.of_job(asked([512], [0.0]), retrieved(512, 0.0, 1.0))) == [
        "layers",
        "retrieval",
    ]
    assert plots.of_job(failed(), []) == {}


def test_a_drawing_is_saved_as_png_pdf_and_csv(tmp_path: Path) -> None:
    drawing = plots.pareto(sweep())
    assert drawing is not None
    plots.save(drawing, tmp_path, "pareto")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "pareto.csv",
        "pareto.pdf",
        "pareto.png",
    ]
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "pareto.pdf").read_bytes().startswith(b"%PDF")
    text = (tmp_path / "pareto.csv").read_text(encoding="utf-8")
    read = pd.read_csv(io.StringIO(text))
    pd.testing.assert_frame_equal(read, drawing.data, check_dtype=False)


def test_the_same_records_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.evals import test_plots as t\n"
        "records, samples = t._all()\n"
        "for name, drawing in t.plots.of_sweep(records, samples.__getitem__).items():\n"
        "    t.plots.save(drawing, Path(sys.argv[1]), name)"
    )
    found: list[dict[str, bytes]] = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code, str(folder)]
        subprocess.run(command, check=True, cwd=ROOT, env=environment)  # noqa: S603
        found.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert len(found[0]) == 18
    assert found[0] == found[1]


def test_names_are_drawn_as_they_are_written(tmp_path: Path) -> None:
    records, samples = _all()
    hostile = {renamed(r, HOSTILE)["key"]: samples[r["key"]] for r in records}
    strange = [renamed(record, HOSTILE) for record in records]
    drawn = plots.of_sweep(strange, hostile.__getitem__)
    assert len(drawn) == 6
    for name, drawing in drawn.items():
        plots.save(drawing, tmp_path, name)
        assert drawing.data.filter(["method", "line"]).iloc[0, 0].startswith(HOSTILE)


@pytest.mark.parametrize("length", [20, 60])
def test_a_long_name_is_cut_in_the_middle(length: int) -> None:
    text = short("gear (gear.bits=2, gear.rank=4, gear.sparse_frac=0.02, seed=1)" * 2, length)
    assert len(text) <= length
    assert text.startswith("gear (bit")
    assert text.endswith("seed=1)")


def test_colours_differ() -> None:
    assert len(set(COLOURS)) == len(COLOURS) == 7
