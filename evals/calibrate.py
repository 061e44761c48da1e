"""Fit a method's tensors on some text: what its cache meets there, one file for all layers.

    python scripts/calibrate.py method=METHOD model=MODEL dataset=DATASET [WORD ...]

WORD is any of run.py's: eval.prefill_tokens is the length of a window, of which --windows are
taken, dealt out over the documents. The exact K and V of every layer that the method covers, or the
queries, after RoPE, go to the method's ``fit`` (gear.calibration.Fitted). The file is called after
all that it depends on and lies below the assets root; a second call finds it, and so do jobs with
``calibration: auto``. It is for other texts than its own: evals/calibrated.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evals.blas import load_optimised_blas
from evals.calibrated import folder, text_hashes
from evals.data import DataError, Document, content_hash, load_documents
from gear.calibration import AUTO, Fitted, Seen

if TYPE_CHECKING:
    import mlx.core as mx

    from evals.models import ModelInfo
    from evals.prefill import PrefillState
    from evals.schema import Config
    from gear.methods import Method

WINDOWS = 8
QUERIES = 3000
"""Of a head, over all windows."""


@dataclass(frozen=True)
class Plan:
    """All that a calibration depends on."""

    config: Config
    method: Fitted
    fits: dict[str, Any]
    """What the method says that its tensors depend on."""
    model: ModelInfo
    documents: list[Document]
    windows: int

    @property
    def metadata(self) -> dict[str, str]:
        """Return what the file says of itself."""
        return {
            "method": str(getattr(self.method, "name", "")),
            "fits": json.dumps(self.fits, sort_keys=True),
            "model": self.model.name,
            "weight_hash": self.model.weight_hash,
            "dataset": self.config.dataset.name,
            "content_hash": content_hash(self.documents),
            "texts": json.dumps(text_hashes(self.documents)),
            "windows": str(self.windows),
            "window_tokens": str(self.config.eval.prefill_tokens),
            "seed": str(self.config.seed),
        }

    @property
    def path(self) -> Path:
        """Return where the file lies, or will."""
        made = self.metadata
        digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()
        return folder() / f"{made['method']}-{digest[:16]}.safetensors"


def plan(words: Sequence[str], windows: int) -> Plan:
    """Return the calibration that ``words`` ask for; what cannot be used raises ``ValueError``."""
    from evals import compose, models
    from evals.record import results_root
    from evals.validate import check_config
    from gear.methods import METHODS

    named = [word.partition("=")[2] for word in words if word.startswith("method=")]
    rest = [word for word in words if not word.startswith("method=")]
    if len(named) != 1 or any(word.startswith("cache=") for word in rest):
        raise DataError(f"method={named}: name one, method=METHOD, of {', '.join(METHODS)}.")
    [config] = compose.plan([*rest, f"cache={named[0]}"]).configs
    if "calibration" not in config.cache:
        raise DataError(f"method={named[0]}: needs no calibration; run cache={named[0]} as it is.")
    config = replace(config, cache={**config.cache, "calibration": AUTO})
    check_config(config)
    model, method = models.describe(config.model, results_root()), compose.make_method(config)
    fits = method.fits(model.n_layers) if isinstance(method, Fitted) else {}
    if not isinstance(method, Fitted) or not fits:
        raise DataError(f"method={named[0]}: takes a file, but nothing here fits one.")
    documents = load_documents(config.dataset, config.seed)
    return Plan(config, method, fits, model, documents, windows)


def windows(plan: Plan, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the token windows: the first of each document, then the second of each, …"""
    size = plan.config.eval.prefill_tokens
    each = [
        [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
        for tokens in (encode(document.text) for document in plan.documents)
    ]
    found = [window for window in chain.from_iterable(zip_longest(*each)) if window is not None]
    if not found:
        raise DataError(
            f"dataset={plan.config.dataset.name}: no document has eval.prefill_tokens={size} "
            "tokens. Next step: lower it, or use a longer text."
        )
    return list(islice(found, plan.windows))


def fit(
    method: Fitted, seen: Mapping[int, Seen], n_layers: int, seed: int
) -> Iterator[tuple[str, mx.array]]:
    """Yield each tensor by its name in the file, ``LAYER.SIDE.NAME``, for the layers ``seen``."""
    for layer, own in seen.items():
        for name, array in method.fit(layer, n_layers, own, seed).items():
            yield f"{layer}.{name}", array


def calibrate(plan: Plan, say: Callable[[str], None] = print) -> Path:
    """Return the file of a calibration, made now where it is not there yet."""
    import mlx.core as mx

    if plan.path.is_file():
        return plan.path
    seen = _collect(plan, say)
    say(f"fitting {len(seen)} layers")
    found = dict(fit(plan.method, seen, plan.model.n_layers, plan.config.seed))
    plan.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=plan.path.parent, prefix=".calibrate-") as work:
        file = Path(work) / "made.safetensors"
        mx.save_safetensors(str(file), found, plan.metadata)
        os.replace(file, plan.path)
    return plan.path


def _collect(plan: Plan, say: Callable[[str], None]) -> dict[int, Seen]:
    """Return what the method is fitted on, of all windows, per covered layer."""
    import mlx.core as mx

    from evals import blas, models
    from evals.caches import make_caches
    from evals.prefill import exact_prefill

    config, backend = plan.config, blas.backend()
    if config.device == "cpu":
        backend = "cpu"
        mx.set_default_device(mx.cpu)  # pyright: ignore[reportArgumentType]
    info = {**asdict(plan.model), "path": plan.model.path and str(plan.model.path)}
    dtype = models.compute_dtype(config.model, plan.model, backend)
    model, tokenizer = models.load(info, dtype)
    covered = make_caches(model, cast("Method", plan.method)).covered
    parts: dict[int, list[dict[str, mx.array]]] = {index: [] for index in covered}
    found = windows(plan, tokenizer.encode)
    for number, window in enumerate(found, start=1):
        say(f"window {number} of {len(found)}, {len(window)} tokens")
        noted = len(window) if plan.method.fits_queries else 0
        state = exact_prefill(model, window, config.eval.prefill_chunk, window=noted)
        for index in covered:
            parts[index].append(_of_window(state, index, len(found) if noted else 0))
        mx.eval(parts)
    return {
        index: Seen(**{n: mx.concatenate([p[n] for p in own]) for n in own[0]})
        for index, own in parts.items()
    }


def _of_window(state: PrefillState, index: int, windows: int) -> dict[str, mx.array]:
    """Return K and V of one layer, or a share of QUERIES among ``windows``, evenly spaced."""
    import mlx.core as mx

    keys, values = state.layers[index].keys_and_values()
    if not windows:
        return {"keys": keys.astype(mx.float32), "values": values.astype(mx.float32)}
    queries = state.queries[index]
    tokens = queries.shape[2]
    count = min(tokens, -(-QUERIES // windows))
    places = mx.array([i * tokens // count for i in range(count)])
    shape = (1, keys.shape[1], -1, count, queries.shape[3])
    return {"queries": mx.take(queries, places, axis=2).reshape(shape)}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description="Fit a method's tensors on a text: method=NAME and the words of run.py."
    )
    parser.add_argument("words", nargs="+", metavar="WORD", help="method=NAME, model=, dataset=, …")
    parser.add_argument("--windows", type=int, default=WINDOWS, help=f"windows ({WINDOWS})")
    given = parser.parse_intermixed_args(argv)
    if given.windows < 1:
        parser.error(f"--windows {given.windows}: must be at least 1")
    try:
        planned = plan(given.words, given.windows)
        os.environ.setdefault("MLX_ENABLE_TF32", "0")  # as in the worker: fp32 means fp32
        load_optimised_blas()
        file = calibrate(planned)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    name = planned.config.cache["name"]
    print(f"ready: {file}\nuse it: python run.py cache={name} cache.calibration={AUTO}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
