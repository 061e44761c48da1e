"""Decoding in a batch: time an item (one sequence's new tokens) of batch 8 against batch 1.

The shape of llama-3.2-1B with random weights (fp16 on a GPU), prompts of ``--context`` tokens of
random K and V, each row a few tokens longer than the one before, and STEPS new tokens a row: each
forms two blocks of 64. Rows are filled alone and merged, as evals/generation.py does.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import mlx.core as mx

from benches.llama import KINDS, build, caches_of, fill, kv_shape
from benches.timing import Options, Row, at_least, device, in_turns

BATCH = 8
CONTEXT = 800
LONGER = 5  # tokens that a row has more than the one before
STEPS = 128
REPEATS = 3
FASTER = 2.5
MEASURED = ("fp16", "GEAR 2-bit")


def run(options: Options) -> list[Row]:
    """Return the time an item of both batches, for fp16 and GEAR, and their ratios."""
    dtype = getattr(mx, options.dtype or ("float32" if device() == "cpu" else "float16"))
    model, context = build(options.layers, dtype), options.context or CONTEXT
    rows: list[Row] = []
    for kind in (kind for kind in KINDS if kind in MEASURED):
        with caches_of(kind, model) as like:
            prompts = [
                _prompt(like, model, context + LONGER * i, options.fill) for i in range(BATCH)
            ]
            sizes = {"batch 1": prompts[:1], f"batch {BATCH}": prompts}
            repeats = options.repeats or REPEATS
            fresh = {name: _merged(some, repeats + 1) for name, some in sizes.items()}
            runs = {
                n: partial(_generate, model, len(sizes[n]), ready) for n, ready in fresh.items()
            }
            timed = in_turns(runs, repeats)
        items = {name: row["median_ms"] / len(sizes[name]) for name, row in timed.items()}
        for name, row in timed.items():
            row |= {
                "name": f"{kind}: an item of {STEPS} tokens behind {context}, {name}",
                "median_ms": items[name],
                "iqr_ms": row["iqr_ms"] / len(sizes[name]),
                "tok_per_s": 1e3 * STEPS / items[name],
            }
        rows += timed.values()
        ratio = items["batch 1"] / items[f"batch {BATCH}"]
        name = f"{kind}: an item of batch 1 over one of batch {BATCH}, {len(model.layers)} layers"
        bar = kind != "fp16" and device() != "cpu"
        rows.append(at_least(name, ratio, FASTER, "x") if bar else {"name": name, "ratio": ratio})
    return [{"bar": "", **row} for row in rows]


def _prompt(like: list[Any], model: Any, tokens: int, piece: int) -> list[Any]:
    """Return caches as ``like`` (empty ones) behind ``tokens`` random K and V."""
    caches = copy.deepcopy(like)
    fill(caches, kv_shape(model), tokens, model.layers[0].self_attn.q_proj.weight.dtype, piece)
    return caches


def _merged(prompts: list[list[Any]], runs: int) -> list[list[Any]]:
    """Return caches for each of ``runs``: copies of the prompts', together where there are several.

    They are made before the clock starts.
    """
    found = []
    for _ in range(runs):
        rows = copy.deepcopy(prompts)
        mx.eval([cache.state for row in rows for cache in row])
        several = len(rows) > 1
        found.append([c[0].merge(list(c)) for c in zip(*rows, strict=True)] if several else rows[0])
    return found


def _generate(model: Any, rows: int, ready: list[list[Any]]) -> None:
    """Decode STEPS tokens of each of ``rows`` rows with the next caches that are ``ready``."""
    caches, tokens = ready.pop(), mx.ones((rows, 1), mx.int32)
    for _ in range(STEPS):
        tokens = model(tokens, cache=caches)[:, -1:].argmax(-1)
        mx.eval(tokens)
