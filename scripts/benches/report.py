"""What a run of the benches leaves: a table, JSON, and a section of BENCHMARKS.md.

BENCHMARKS.md has one section a machine, ``## device``, with a part a bench, ``### name``; a run
replaces its own parts and leaves all others as they are, so that a CPU's and a GPU's numbers live
side by side, each with the versions and the commit that it was measured with.
"""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from benches import BLAS
from benches.timing import Row
from evals.environment import CHECKOUT, git_state

PACKAGES = ("mlx", "mlx-lm", "veloxquant-mlx")
COLUMNS = {
    "median_ms": ("median ms", "{:.3f}"),
    "iqr_ms": ("iqr ms", "{:.3f}"),
    "tok_per_s": ("tokens/s", "{:.1f}"),
    "mib": ("MiB", "{:.1f}"),
    "ratio": ("ratio", "{:.3f}"),
    "bar": ("bar", "{}"),
    "met": ("met", "{}"),
}
WIDTH = 160
TITLE = """# Benchmarks

Written by `python scripts/bench.py NAME... --markdown BENCHMARKS.md`. Every ratio is two timings
or two peaks of one run; times are medians with the interquartile range.
"""


def environment(commit: str | None = None) -> dict[str, str]:
    """Return what the numbers depend on; ``commit`` where git cannot say it."""
    state = git_state(CHECKOUT)
    here = "unknown" if state is None else state["commit"][:12] + "+" * state["dirty"]
    versions = {name: found for name in PACKAGES if (found := _version(name)) is not None}
    return {
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
        "blas": BLAS,
        "commit": commit or here,
    }


def _version(package: str) -> str | None:
    """Return the installed version of a package, None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cells(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the text of each row; a column that no row has is left out."""
    used = [key for key in COLUMNS if any(row.get(key, "") != "" for row in rows)]
    lines = [[row["name"], *(_cell(key, row) for key in used)] for row in rows]
    return ["what", *(COLUMNS[key][0] for key in used)], lines


def _cell(key: str, row: Row) -> str:
    """Return the text of one value, "" where the row has none."""
    if key == "met" and key in row:
        return "yes" if row[key] else "NO"
    return COLUMNS[key][1].format(row[key]) if key in row else ""


def show(title: str, rows: list[Row]) -> None:
    """Print a bench's rows."""
    header, lines = cells(rows)
    table = Table(*header, title=title)
    for line in lines:
        table.add_row(*line)
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH  # a file's reader scrolls
    console.print(table)


def updated(text: str, environment: dict[str, str], results: dict[str, list[Row]]) -> str:
    """Return the text of BENCHMARKS.md with ``results`` in the section of this device."""
    head, *sections = re.split(r"^(?=## )", text or TITLE, flags=re.MULTILINE)
    title = f"## {environment['device']}"
    found = {section.splitlines()[0]: section for section in sections}
    own, *parts = re.split(r"^(?=### )", found.get(title, title), flags=re.MULTILINE)
    kept = {part.splitlines()[0]: part.strip() for part in parts}
    kept |= {f"### {name}": _part(name, environment, rows) for name, rows in results.items()}
    found[title] = "\n\n".join([own.strip(), *(kept[name] for name in sorted(kept))])
    return "\n\n".join(part.strip() for part in (head, *found.values())) + "\n"


def _part(name: str, environment: dict[str, Any], rows: list[Row]) -> str:
    """Return one bench as Markdown, with what it depends on."""
    header, lines = cells(rows)
    facts = [f"{key} {value}" for key, value in environment.items() if key != "device"]
    table = [header, ["---", *("---:" for _ in header[1:])], *lines]
    written = "\n".join("| " + " | ".join(line) + " |" for line in table)
    return f"### {name}\n\n{', '.join(facts)}\n\n{written}"
