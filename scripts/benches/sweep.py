"""What a sweep costs: against separate runs, against fp16 alone, and for each job beside computing.

Commands are ``run.py`` as a user runs it, in processes of their own, each with an empty results
root, timed once from start to exit. The sweep is 12 points of ``gear.*`` on the bundled model
(``eval=decode``, P = 1536, T = 512). Of the 12 separate runs three are timed, first, middle and
last, and their mean counts 12 times, unless ``--all-separate``. Perplexity throughput is the whole
job of ``cache=fp16 eval=oneshot`` in a warm worker against mlx_lm.perplexity on the same windows.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess  # run.py is measured as its user runs it
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import mlx.core as mx

from benches.timing import Options, Row, at_least, at_most, in_turns

RUN = Path(__file__).resolve().parents[2] / "run.py"
GRID = {"gear.rank": (2, 4, 8), "gear.bits": (2, 4), "gear.sparse_frac": (0, 0.02)}
SIZES = ("eval.prefill_tokens=1536", "eval.scored_tokens=512")
TINY = ("model=tiny", "eval.prefill_tokens=256", "eval.scored_tokens=64", "dataset.limit=1")
MODEL = "model=smollm2"
SHARE_OF_SEPARATE, TIMES_FP16, THROUGHPUT, JOB_S = 0.35, 6, 0.9, 0.5
REPEATS = 3

Words = list[str]


def run(options: Options) -> list[Row]:
    """Time the sweep, what it is compared with, and the fixed cost of a job."""
    limit = [] if options.limit is None else [f"dataset.limit={options.limit}"]
    common = [MODEL, "eval=decode", *SIZES, *limit]
    throughput = [MODEL, "cache=fp16", "eval=oneshot", *SIZES, *limit]
    return [
        *_sweep(common, all_separate=options.all_separate),
        *_throughput(throughput, options.repeats or REPEATS),
        *_fixed_cost(),
    ]


def points() -> list[Words]:
    """Return the words of each point of the sweep."""
    names = list(GRID)
    return [
        [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        for values in product(*GRID.values())
    ]


def swept() -> Words:
    """Return the words that ask for all points at once."""
    return ["-m", *(f"{name}={','.join(map(str, values))}" for name, values in GRID.items())]


def seconds(words: Sequence[str]) -> float:
    """Return how long ``run.py`` takes with these words and an empty results root.

    RuntimeError, with the end of what it printed, where it fails.
    """
    with tempfile.TemporaryDirectory() as root:
        start = time.perf_counter()
        done = subprocess.run(  # noqa: S603
            [sys.executable, str(RUN), *words],
            env={**os.environ, "GEAR_MLRUNS": root},
            capture_output=True,
            text=True,
        )
        taken = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(
            f"run.py {' '.join(words)} failed:\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return taken


def _once(name: str, taken_s: float) -> Row:
    """Return the row of something timed once."""
    return {"name": name, "median_ms": 1000 * taken_s, "bar": ""}


def _sweep(common: Words, *, all_separate: bool) -> list[Row]:
    """Return the sweep's time, and its ratios to separate runs and to the fp16 run alone."""
    every = points()
    timed = every if all_separate else [every[0], every[len(every) // 2], every[-1]]
    sweep = seconds([*swept(), *common])
    separate = mean(seconds([*point, *common]) for point in timed) * len(every)
    fp16 = seconds(["cache=fp16", *common])
    alone = f"{len(every)} separate runs"
    alone += " (all timed)" if all_separate else f" ({len(timed)} timed, scaled)"
    what = f"a sweep of {len(every)} gear.* points"
    return [
        _once(what, sweep),
        _once(alone, separate),
        _once("the fp16 run alone", fp16),
        at_most(f"{what} over {alone}", sweep / separate, SHARE_OF_SEPARATE, "x"),
        at_most(f"{what} over the fp16 run alone", sweep / fp16, TIMES_FP16, "x"),
    ]


def _jobs(words: Words, root: Path) -> list[Any]:
    """Return the jobs that a command line asks for."""
    from evals.compose import plan
    from evals.job import build_job

    multirun = "-m" in words
    configs = plan([word for word in words if word != "-m"], multirun).configs
    return [build_job(config, root) for config in configs]


def _compute(job: Any) -> None:
    """Compute a job as a worker does. RuntimeError where it fails."""
    from evals.compute import compute
    from evals.record import FINISHED

    body = compute(job.spec, lambda *_progress: None)
    if body["status"] != FINISHED:
        raise RuntimeError(f"{job.title} failed: {body['error']}")


def _throughput(words: Words, repeats: int) -> list[Row]:
    """Return the fp16 job's time against mlx-lm's perplexity on the same windows, batch 1."""
    from mlx_lm.perplexity import eval_ppl

    with tempfile.TemporaryDirectory() as root:
        [job] = _jobs(words, Path(root))
        model, data = _windows(job)

        def theirs() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                eval_ppl(model, data, batch_size=1)

        ours = "fp16, eval=oneshot: the whole job in a warm worker"
        runs = {ours: lambda: _compute(job), "mlx_lm.perplexity, batch 1": theirs}
        timed = list(in_turns(runs, repeats).values())
    for row in timed:
        row["tok_per_s"] = 1000 * data.shape[0] * (data.shape[1] - 1) / row["median_ms"]
    ratio = timed[0]["tok_per_s"] / timed[1]["tok_per_s"]
    name = f"perplexity throughput over mlx_lm.perplexity's, {len(data)} x {data.shape[1]} tokens"
    return [*timed, at_least(name, ratio, THROUGHPUT, "x")]


def _windows(job: Any) -> tuple[Any, mx.array]:
    """Return the model of a job and its windows [windows, P + T + 1]."""
    from evals import models
    from evals.data import load_documents
    from evals.schema import DatasetConfig
    from evals.windows import windows_of

    model, tokenizer = models.load(job.spec["model"], job.config["dtype"])
    dataset, settings = DatasetConfig(**job.spec["dataset"]), job.config["eval"]
    documents = load_documents(dataset, job.config["seed"])
    sizes = settings["prefill_tokens"], settings["scored_tokens"], dataset.windows_per_document
    found, _ = windows_of(documents, tokenizer, *sizes)
    return model, mx.array([[*w.prefill, *w.fed, w.targets[-1]] for w in found])


def _fixed_cost() -> list[Row]:
    """Return what a job of a warm sweep costs beside its computing, on the tiny model."""
    many, words = [*swept(), *TINY], [*points()[0], *TINY]
    with tempfile.TemporaryDirectory() as root:
        jobs = _jobs(many, Path(root))
        for job in (jobs[0].baseline, jobs[0]):
            _compute(job)  # warm
        start = time.perf_counter()
        for job in jobs[1:]:
            _compute(job)
        computing = (time.perf_counter() - start) / (len(jobs) - 1)
    cost = (seconds(many) - seconds(words)) / (len(jobs) - 1)
    name = f"a job of a warm sweep of {len(jobs)}, tiny model"
    return [
        _once(f"{name}: all of it", cost),
        _once(f"{name}: computing", computing),
        at_most(f"{name}: config, key, record, MLflow, in s", cost - computing, JOB_S, " s"),
    ]
