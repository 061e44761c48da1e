"""What a record says about where it was measured: versions, machine, git state. No MLX import."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DISTRIBUTIONS = (
    "gear-mlx", "mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm",
    "numpy", "scipy", "tokenizers", "datasets", "hydra-core", "omegaconf", "mlflow",
)  # fmt: skip
"""Packages whose version is recorded where they are installed."""

CHECKOUT = Path(__file__).resolve().parents[1]


@cache
def environment() -> dict[str, Any]:
    """Return versions, platform and git state as plain values; the worker adds device and BLAS."""
    return {
        "python": platform.python_version(),
        "versions": {name: found for name in DISTRIBUTIONS if (found := _version(name))},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "git": git_state(CHECKOUT),
    }


def _version(distribution: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def git_state(checkout: Path) -> dict[str, Any] | None:
    """Return ``{"commit", "dirty"}``; None without git or where ``checkout`` is no checkout's top.

    An installed package inside somebody's repository must not report that repository's commit.
    """
    top, commit = (
        _git(checkout, "rev-parse", "--show-toplevel"),
        _git(checkout, "rev-parse", "HEAD"),
    )
    if top is None or commit is None or Path(top).resolve() != checkout.resolve():
        return None
    return {"commit": commit, "dirty": bool(_git(checkout, "status", "--porcelain"))}


def git_diff(checkout: Path = CHECKOUT) -> str:
    """Return the checkout's uncommitted changes as a diff; empty without any, or without git."""
    if git_state(checkout) is None:
        return ""
    return _git(checkout, "diff", "HEAD") or ""


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what a reading git command prints, or None where it cannot."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=30, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
