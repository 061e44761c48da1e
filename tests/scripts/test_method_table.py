"""The README's table of methods is what scripts/method_table.py measures."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from evals.names import conf_dir, options

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))  # as Python does for a script

import method_table  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = {"HEADS": 2, "TOKENS": 512, "HEAD_DIM": 64}


def test_every_yaml_has_its_row() -> None:
    section = README.partition("\n## Every method\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert rows == options([conf_dir()])["cache"]


@pytest.mark.parametrize("name", ["fp16", "gear", "kivi", "svdq", "adakv", "cachegen", "vecinfer"])
def test_a_row_is_what_is_measured(name: str) -> None:
    assert method_table.row(name) in README.splitlines()


def test_bits_are_those_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    for field, value in SHORT.items():
        monkeypatch.setattr(method_table, field, value)
    assert "| 16.00 |" in method_table.row("fp16")
    assert "| 2.50 |" in method_table.row("kivi")  # 2 bits, and 32 bits a group of 64
