"""Hold this package's methods against veloxquant-mlx's on the same K and V: errors and bytes.

    pip install veloxquant-mlx==0.94.15
    python scripts/compare_veloxquant.py [--model smollm2] [--method kivi gear ...]

K and V [1, heads, tokens, head_dim] are a seeded Gaussian draw with outlier channels in K and, with
--model, those of three layers of the bundled model, after a prefill of an embedded text (the mean).
Bits, group, rank and budget are equal where both have them. Prints a table and why its methods
differ (scripts/comparison/notes.py); --json and --markdown write both. A method that cannot run
has its error in its row.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# A checkout that is not installed: the packages lie beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    found.add_argument("--model", choices=("smollm2",), help="also K and V of this model")
    found.add_argument("--method", nargs="+", help="these methods alone, by our names")
    found.add_argument("--json", type=Path, help="write rows and notes to this file")
    found.add_argument("--markdown", type=Path, help="write them as Markdown to this file")
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write."""
    args = parser().parse_args(argv)
    from comparison import notes, report, theirs  # MLX comes in here, behind --help

    from evals.models import ModelError

    if unknown := sorted(set(args.method or ()) - notes.WHY.keys()):
        allowed = ", ".join(notes.WHY)
        print(f"--method {' '.join(unknown)}: must be among {allowed}.", file=sys.stderr)
        return 2
    try:
        version = theirs.installed()
        rows = list(_rows(args.model, args.method or list(notes.WHY)))
    except (theirs.Missing, ModelError) as error:
        print(error, file=sys.stderr)
        return 1
    report.show(rows)
    facts = _facts(version)
    for file, text in ((args.json, report.as_json), (args.markdown, report.as_markdown)):
        if file:
            file.write_text(text(rows, facts), encoding="utf-8")
    return 0


def _rows(model: str | None, methods: Sequence[str]) -> Iterator[Any]:
    """Yield a row for each pair of ``methods`` on each kind of data."""
    from comparison import data, ours, pairs, report

    kinds = [[data.gaussian(pairs.TOKENS)]] + ([list(data.real(pairs.TOKENS))] if model else [])
    for samples in kinds:
        for pair in pairs.pairs():
            if pair.method not in methods:
                continue
            print(f"{samples[0].name}: {pair.method}, {pair.setting}", file=sys.stderr)
            own = _tried(lambda s, p=pair: ours.measure(p.method, p.options, p.gear, s), samples)
            other = _tried(pair.theirs, samples)
            yield report.Row(samples[0].name, pair.method, pair.setting, own, other)


def _tried(measure: Callable[[Any], Any], samples: Sequence[Any]) -> Any:
    """Return the mean over samples, or what was raised."""
    from comparison.found import mean

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs, about small budgets
            return mean(measure(sample) for sample in samples)
    except Exception as error:  # a row says it: the others are worth having
        return f"{type(error).__name__}: {error}"


def _facts(version: str) -> dict[str, str]:
    """Return what the numbers depend on."""
    from comparison import BLAS, data, pairs

    from evals.environment import environment

    known = environment()
    versions = {name: known["versions"][name] for name in ("mlx", "mlx-lm", "numpy")}
    return {"veloxquant-mlx": version, **versions, "blas": BLAS, "tokens": str(pairs.TOKENS),
            "seed": str(data.SEED)}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
