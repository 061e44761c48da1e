"""Who may import whom: the rooms stay apart, and the parent process stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("gear/**/*.py"), *ROOT.glob("evals/**/*.py")])


def _imports(path: Path) -> set[str]:
    """Return the dotted names that a module imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _importers(package: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if any(name == package or name.startswith(package + ".") for name in _imports(path))
    }


@pytest.mark.parametrize("package", ["evals", "hydra", "omegaconf", "mlflow"])
def test_gear_does_not_know_the_harness(package: str) -> None:
    assert not {path for path in _importers(package) if path.startswith("gear/")}


def test_only_tracking_imports_mlflow() -> None:
    assert {path.split("_")[0].removesuffix(".py") for path in _importers("mlflow")} == {
        "evals/tracking"
    }


def test_only_models_loads_models() -> None:
    loaders = (
        _importers("mlx_lm.utils")
        | _importers("mlx_lm.load")
        | _importers("mlx_lm.tokenizer_utils")
    )
    assert loaders == {"evals/models.py"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gear", ["mlx", "mlx_lm", "hydra", "mlflow"]),
        ("gear.config", ["mlx", "numpy"]),
        ("gear.methods.gear", ["mlx"]),
        ("gear.methods.per_token", ["mlx"]),
        ("evals.cli", ["mlx", "mlx_lm", "mlflow", "datasets", "transformers", "matplotlib"]),
        ("evals.runner", ["mlx", "mlx_lm", "mlflow", "transformers"]),
        ("evals.compute", ["mlflow", "hydra"]),
    ],
)
def test_importing_a_module_leaves_these_out(module: str, absent: list[str]) -> None:
    code = f"import {module}, sys; print(*[m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == ""


def test_every_module_says_what_it_is_and_fits_on_its_pages() -> None:
    for path in [*SOURCES, *ROOT.glob("scripts/*.py"), ROOT / "run.py"]:
        text = path.read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(text)), path
        assert text.count("\n") <= 300, path
        assert "gear/methods/" not in str(path) or text.count("\n") <= 150, path
