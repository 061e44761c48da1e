"""What the README shows is what the code prints."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path

from gear.config import GearConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_costs_is_the_computed_one() -> None:
    spec = importlib.util.spec_from_file_location(
        "settings_cost", ROOT / "scripts/settings_cost.py"
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table() in README


def test_every_setting_of_gear_is_named() -> None:
    section = README.split("## The method", 1)[1].split("\n## ", 1)[0]
    for setting in fields(GearConfig):
        assert f"`{setting.name}" in section, setting.name
