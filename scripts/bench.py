"""Measure speed and memory; every claim of a ratio is two timings or two peaks of one run.

    python scripts/bench.py compress     # one block: low rank against SVD, time, peak memory
    python scripts/bench.py attention    # one query and a chunk of 64 over N tokens, against exact
    python scripts/bench.py memory       # peak of decode and of prefill at 32k, against fp16
    python scripts/bench.py decode       # tokens/s, stored bytes, veloxquant-mlx's gear
    python scripts/bench.py batch        # time an item of batch 8 against batch 1
    python scripts/bench.py sweep        # a sweep against separate runs, overhead of a job
    python scripts/bench.py soak         # hundreds of jobs: memory, cost of a job, MLflow's pages

Prints tables and writes JSON (``--out``) and a section of BENCHMARKS.md (``--markdown``). Timings
are medians over repeats after a warm-up, with the interquartile range; outputs are evaluated
before the clock stops. Each module of scripts/benches says what its bench measures.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

BENCHES = ("attention", "batch", "compress", "decode", "memory", "soak", "sweep")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    found.add_argument("bench", nargs="+", choices=BENCHES)
    found.add_argument("--repeats", type=int, help="timings of each thing; default: the bench's")
    found.add_argument("--tokens", type=int, nargs="+", help="attention: N, up to 131072")
    found.add_argument("--fill", type=int, default=2048, help="tokens of a prefill block")
    found.add_argument(
        "--context", type=int, help="memory (32768), decode (8192), batch (800): tokens"
    )
    found.add_argument("--chunk", type=int, default=2048, help="memory: tokens of a prefill call")
    found.add_argument(
        "--layers", type=int, help="memory, decode, batch: layers with random weights"
    )
    found.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    found.add_argument("--limit", type=int, help="sweep: documents; soak: jobs (500)")
    found.add_argument("--plot", type=Path, help="soak: draw its curves into this file")
    found.add_argument("--all-separate", action="store_true", help="sweep: time all 12 runs alone")
    found.add_argument("--out", type=Path, help="write the rows as JSON")
    found.add_argument("--markdown", type=Path, help="write them into a section of this file")
    found.add_argument("--commit", help="what was measured, where git cannot say it")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the benches named on the command line."""
    args = vars(parser().parse_args(argv))
    from gear import cuda_environment

    cuda_environment.set_up()
    from benches import report  # MLX comes in here, behind --help and a wrong name
    from benches.timing import Options

    args["tokens"] = args["tokens"] and tuple(args["tokens"])
    options = Options(**{field.name: args[field.name] for field in fields(Options)})
    environment, results = report.environment(args["commit"]), {}
    for name in args["bench"]:
        results[name] = import_module(f"benches.{name}").run(options)
        report.show(name, results[name])
        # After each one: a later bench may fail, and these numbers took minutes.
        if args["out"]:
            text = json.dumps({"environment": environment, "results": results}, indent=1)
            args["out"].write_text(text, encoding="utf-8")
        if args["markdown"]:
            file = args["markdown"]
            before = file.read_text(encoding="utf-8") if file.exists() else ""
            file.write_text(report.updated(before, environment, results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
