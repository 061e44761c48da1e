"""Fit a method's tensors on some text: K and V as the cache gets them, one file for all layers.

    python scripts/calibrate.py method=METHOD model=MODEL dataset=DATASET [WORD ...]

WORD is any of run.py's: eval.prefill_tokens is the length of a window, of which --windows are
taken, dealt out over the documents. The exact K and V of every layer that the method covers, after
RoPE, go to the base's ``fit``. The file is called after all that it depends on and lies below the
assets root; a second call finds it. It is for other texts than its own: jobs that share one are
refused (evals/calibrated.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.assets import assets_root
from evals.calibrated import text_hashes
from evals.data import DataError, Document, content_hash, load_documents
from gear.bases import load_base

if TYPE_CHECKING:
    import mlx.core as mx

    from evals.models import ModelInfo
    from evals.schema import Config
    from gear.config import LayerSettings
    from gear.methods import Method

WINDOWS = 8


@dataclass(frozen=True)
class Plan:
    """All that a calibration depends on."""

    config: Config
    model: ModelInfo
    documents: list[Document]
    windows: int

    @property
    def metadata(self) -> dict[str, str]:
        """Return what the file says of itself."""
        own = ("name", "_target_", "settings", "calibration")
        options = {n: v for n, v in self.config.cache.items() if n not in own}
        return {
            "method": str(self.config.cache["name"]),
            "options": json.dumps(options, sort_keys=True),
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
        made = json.dumps(self.metadata, sort_keys=True).encode()
        name = f"{self.config.cache['name']}-{hashlib.sha256(made).hexdigest()[:16]}.safetensors"
        return assets_root() / "calibration" / name


def plan(words: Sequence[str], windows: int, placeholder: Path) -> Plan:
    """Return the calibration that ``words`` ask for; what cannot be used raises ``ValueError``.

    ``placeholder`` stands for the file, which the settings would not be valid without.
    """
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
    config = replace(config, cache={**config.cache, "calibration": str(placeholder)})
    check_config(config)
    documents = load_documents(config.dataset, config.seed)
    return Plan(config, models.describe(config.model, results_root()), documents, windows)


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
    layers: Sequence[LayerSettings], seen: dict[int, tuple[mx.array, mx.array]], seed: int
) -> Iterator[tuple[str, mx.array]]:
    """Yield each tensor by its name in the file, ``LAYER.SIDE.NAME``.

    ``seen`` is K and V [1, kv_heads, tokens, head_dim] of the covered layers.
    """
    for index, kv in seen.items():
        layer = layers[index]
        for side, s, x in zip("kv", (layer.k, layer.v), kv, strict=True):
            base: Any = load_base(s.base)
            if not hasattr(base, "fit"):
                continue
            for name, array in base.fit(side, x, s, seed).items():
                yield f"{index}.{side}.{name}", array


def calibrate(plan: Plan, method: Method, say: Callable[[str], None] = print) -> Path:
    """Return the file of a calibration, made now where it is not there yet."""
    import mlx.core as mx

    layers = method.layers(plan.model.n_layers) if hasattr(method, "layers") else []  # type: ignore[attr-defined]
    if not any(hasattr(load_base(s.base), "fit") for layer in layers for s in (layer.k, layer.v)):
        raise DataError(
            f"method={plan.config.cache['name']}: takes a file, but nothing here fits one."
        )
    if plan.path.is_file():
        return plan.path
    seen = _collect(plan, method, say)
    say(f"fitting {len(seen)} layers")
    found = dict(fit(layers, seen, plan.config.seed))
    plan.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=plan.path.parent, prefix=".calibrate-") as work:
        file = Path(work) / "made.safetensors"
        mx.save_safetensors(str(file), found, plan.metadata)
        os.replace(file, plan.path)
    return plan.path


def _collect(
    plan: Plan, method: Method, say: Callable[[str], None]
) -> dict[int, tuple[mx.array, mx.array]]:
    """Return K and V of all windows, one after another along the tokens, per covered layer."""
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
    covered = make_caches(model, method).covered
    parts: dict[int, list[Any]] = {index: [] for index in covered}
    found = windows(plan, tokenizer.encode)
    for number, window in enumerate(found, start=1):
        say(f"window {number} of {len(found)}, {len(window)} tokens")
        state = exact_prefill(model, window, config.eval.prefill_chunk)
        for index in covered:
            parts[index].append(
                [x.astype(mx.float32) for x in state.layers[index].keys_and_values()]
            )
        mx.eval(parts)
    return {
        index: (
            mx.concatenate([k for k, _ in kv], axis=2),
            mx.concatenate([v for _, v in kv], axis=2),
        )
        for index, kv in parts.items()
    }


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
    from evals.compose import make_method

    with tempfile.TemporaryDirectory() as work:
        placeholder = Path(work) / "none.safetensors"
        placeholder.write_bytes((2).to_bytes(8, "little") + b"{}")
        try:
            planned = plan(given.words, given.windows, placeholder)
            file = calibrate(planned, make_method(planned.config))
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    name = planned.config.cache["name"]
    print(f"ready: {file}\nuse it: python run.py cache={name} cache.calibration={file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
