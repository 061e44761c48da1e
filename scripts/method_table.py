"""Print the README's table of methods: every conf/cache/*.yaml with its paper, bits and first line.

    python scripts/method_table.py

Bits are stored bytes of real caches: three layers (cachegen's bits fall from layer to layer) behind
one prefill of TOKENS Gaussian tokens of HEADS heads and HEAD_DIM channels, in bits per element of K
and V, exact tokens included. A test holds the README to it.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import mlx.core as mx

from evals.compose import plan
from evals.job import build_method
from evals.names import conf_dir, options
from gear.calibration import Fitted
from gear.methods import Method

HEADS, TOKENS, HEAD_DIM, LAYERS = 4, 1024, 128, 3
HEADINGS = ("| `cache=` | paper | bits | GEAR on it | what it is |", "|---|---|---:|---|---|")


def bits(method: Method) -> str:
    """Return the stored bits per element of K and V, or why there are none."""
    if isinstance(method, Fitted) and method.fits(LAYERS):
        return "needs a file"
    stored = 0
    for index in range(LAYERS):
        cache = method.make_cache(index, LAYERS)
        draw = partial(mx.random.normal, (1, HEADS, TOKENS, HEAD_DIM))
        keys, values = (draw(key=mx.random.key(2 * index + side)) for side in range(2))
        if window := getattr(cache, "query_window", 0):
            cache.observe(mx.random.normal((1, HEADS, window, HEAD_DIM), key=mx.random.key(9)))
        cache.update_and_fetch(keys, values)
        cache.flush()
        stored += cache.cache_bytes().stored
    return f"{8 * stored / (2 * LAYERS * HEADS * TOKENS * HEAD_DIM):.2f}"


def row(name: str) -> str:
    """Return the table's row of one option of ``cache=``."""
    [config] = plan([f"cache={name}"]).configs
    method = build_method(config.cache)
    module = import_module(type(method).__module__)
    paper = re.search(r"\d{4}\.\d{5}", module.__doc__ or "")
    text = (conf_dir() / "cache" / f"{name}.yaml").read_text(encoding="utf-8")
    what = " ".join(re.findall(r"^# ?(.*)$", text.partition("\nname:")[0], re.MULTILINE))
    both, of_k = (
        getattr(type(method), name, {}).get("base") for name in ("switches", "switches_k")
    )
    corrected = f"`gear.base={both}`" if both not in (None, "grouped", "vector") else ""
    if of_k is not None:
        corrected = f"`gear.k.base={of_k}`"
    return f"| `{name}` | {paper[0] if paper else ''} | {bits(method)} | {corrected} | {what} |"


def table() -> str:
    """Return the whole table as Markdown."""
    names = options([conf_dir()])["cache"]
    return "\n".join([*HEADINGS, *map(row, names)])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    print(table())
