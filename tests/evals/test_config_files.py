"""A YAML file as it is written: its names, its types, and what parsing would hide."""

from pathlib import Path

import pytest

from evals.config_files import check_file
from evals.names import ConfigError


@pytest.mark.parametrize(
    ("package", "text", "answer"),
    [
        ("gear", "bits: 2\nbits: 4\n", r"own.yaml:2: the key 'bits' stands twice"),
        ("gear", "by_layer:\n  3: {}\n  3: {}\n", r"own.yaml:3: the key '3' stands twice"),
        ("gear", "bits: '4'\n", r"own.yaml: gear.bits='4': must be an integer"),
        ("gear", "clip: 'false'\n", "must be true or false"),
        ("gear", "rnak: 4\n", r"own.yaml: gear.rnak: .* Did you mean gear.rank"),
        ("gear", "k: {bit: 4}\n", "Did you mean bits"),
        ("_global_", "gear:\n  rank: 4.5\n", "gear.rank=4.5"),
        ("_global_", "sede: 1\n", "Did you mean seed"),
        ("experiment", "gear:\n  rank: 4\n", "@package _global_"),
    ],
)
def test_a_file_is_checked_as_it_is_written(
    tmp_path: Path, package: str, text: str, answer: str
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=answer):
        check_file(path, package)


def test_an_ordinary_file_passes(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("defaults:\n  - x\ngear:\n  rank: null\nhydra:\n  mode: MULTIRUN\n", "utf-8")
    check_file(path, "_global_")
    path.write_text("# nothing\n", encoding="utf-8")
    check_file(path, "gear")
