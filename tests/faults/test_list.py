"""README.md's list: every fault has a test, every test named there exists and is marked."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.fault
ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (Path(__file__).parent / "README.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and "---" not in line
][1:]


@cache
def marked(path: str) -> set[str]:
    """Return the tests of a file that bear the mark, all where the module does."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    tests = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    text = [ast.unparse(node) for node in tree.body]
    whole = any(t.startswith("pytestmark") and "pytest.mark.fault" in t for t in text)
    return {
        t.name for t in tests if whole or "pytest.mark.fault" in map(ast.unparse, t.decorator_list)
    }


@pytest.mark.parametrize(("fault", "tests"), ROWS, ids=[fault for fault, _ in ROWS])
def test_a_fault_has_tests_that_exist(fault: str, tests: str) -> None:
    assert tests.split()
    for test in tests.split():
        path, _, name = test.partition("::")
        assert name in marked(path), f"{test}: no such test, or it is not marked"


def test_every_file_of_this_folder_is_in_the_list() -> None:
    here = {str(path.relative_to(ROOT)) for path in Path(__file__).parent.glob("test_*.py")}
    listed = {test.partition("::")[0] for _, tests in ROWS for test in tests.split()}
    assert here - listed == {"tests/faults/test_list.py"}
