"""What a record says of its place: versions and the git state of this checkout only."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from evals import environment as place


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("old\n")
    (tmp_path / "package").mkdir()
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message=start")
    return tmp_path


def test_versions_are_plain_and_found() -> None:
    found = place.environment()
    assert json.loads(json.dumps(found)) == found
    assert {"mlx", "mlx-lm", "numpy", "mlflow"} <= found["versions"].keys()


def test_a_clean_and_a_dirty_checkout(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert place.git_state(checkout) == {"commit": commit, "dirty": False}
    assert place.git_diff(checkout) == ""
    (checkout / "file").write_text("new\n")
    assert place.git_state(checkout) == {"commit": commit, "dirty": True}
    assert "-old\n+new" in place.git_diff(checkout)


def test_an_untracked_file_makes_a_checkout_dirty(checkout: Path) -> None:
    (checkout / "more").touch()
    assert place.git_state(checkout) == {
        "commit": git(checkout, "rev-parse", "HEAD"),
        "dirty": True,
    }


def test_a_package_inside_another_repository_has_no_git_state(checkout: Path) -> None:
    (checkout / "file").write_text("new\n")
    assert place.git_state(checkout / "package") is None
    assert place.git_diff(checkout / "package") == ""


@pytest.mark.fault
def test_no_git_and_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert place.git_state(tmp_path) is None
    monkeypatch.setattr(place.shutil, "which", lambda name: None)
    assert place.git_state(place.CHECKOUT) is None
