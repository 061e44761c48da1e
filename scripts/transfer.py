"""Cross-model cache transfer: one model's K and V from another's, by ridge (arXiv:2608.03893).

    python scripts/transfer.py --source smollm2 --source-bits 3 --target smollm2

Both models read the same tokens. For each layer and KV head of the target a ridge regression takes
K and V of all heads of the source's layers around the same depth (and a constant) to the head's K,
and another to its V. Keys are un-rotated before (RoPE by the negated position) and rotated again
after, so one map serves every position. The maps are fitted on some documents; printed are, on
others, the errors ‖X - X'‖_F / ‖X‖_F of the mean of the fitting text, of the source's own cache
(where it has the target's shape) and of the maps, and what the target then predicts: the KL from
its own cache, in nats, over the tokens behind the prefill. This compresses nothing.

``--source-bits`` rounds the weights of the source's linear layers (a checkpoint beside its
quantized copy): the models at hand that differ and share a tokenizer. ``tiny`` models are random:
they test the machinery and say nothing about language. The recipe is that of a public summary, not
of the paper, which we had no copy of; layers, penalty and what is regressed at once are ours.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals import blas

blas.load_optimised_blas()

import mlx.core as mx  # noqa: E402  (after the BLAS)
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models.cache import KVCache  # noqa: E402

from evals import models  # noqa: E402
from evals.data import load_documents  # noqa: E402
from evals.prefill import exact_prefill  # noqa: E402
from evals.record import results_root  # noqa: E402
from evals.schema import DatasetConfig, ModelConfig  # noqa: E402

Side = np.ndarray
"""K or V of all layers: fp32 [layers, kv_heads, tokens, head_dim]."""


def rotated(model: Any, keys: Side, sign: int) -> Side:
    """Return keys of every layer rotated to their positions (``sign`` 1) or back (-1)."""
    out = []
    for layer, k in zip(model.layers, keys, strict=True):
        rope = layer.self_attn.rope
        if type(rope) is not nn.RoPE:
            raise ValueError(
                f"{type(rope).__name__}: only plain RoPE can be taken back here; use models of it."
            )
        x = mx.fast.rope(
            mx.array(k)[None], rope.dims, traditional=rope.traditional, base=rope.base,
            scale=sign * rope.scale, offset=0,
        )  # fmt: skip
        out.append(np.array(x[0]))
    return np.stack(out)


def cache_of(model: Any, tokens: list[int]) -> tuple[Side, Side]:
    """Return K, not rotated, and V of a prefill."""
    layers = exact_prefill(model, tokens, 512).layers
    both: list[Any] = [layer.keys_and_values() for layer in layers]
    k, v = (np.stack([np.array(p[i].astype(mx.float32))[0] for p in both]) for i in (0, 1))
    return rotated(model, k, -1), v


def features(cache: tuple[Side, Side], layer: int, n_layers: int, around: int) -> np.ndarray:
    """Return [tokens, features]: K and V of the source's layers about as deep as ``layer``."""
    have = len(cache[0])
    middle = round(layer * (have - 1) / max(n_layers - 1, 1))
    near = slice(max(middle - around, 0), middle + around + 1)
    parts = [side[near].transpose(2, 0, 1, 3).reshape(side.shape[2], -1) for side in cache]
    return np.concatenate([*parts, np.ones((len(parts[0]), 1))], axis=1, dtype=np.float64)


def ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> np.ndarray:
    """Return W that makes ‖Y - XW‖² + penalty · mean(diag XᵀX) · ‖W‖² least."""
    gram = x.T @ x
    gram[np.diag_indices_from(gram)] += penalty * np.trace(gram) / len(gram)
    return np.linalg.solve(gram, x.T @ y)


@dataclass
class Maps:
    """The maps of every layer, heads side by side, and the means of what they were fitted on."""

    weights: list[tuple[np.ndarray, np.ndarray]]
    means: tuple[Side, Side]
    around: int

    @classmethod
    def fit(cls, source: Sequence[Any], target: Sequence[Any], around: int, penalty: float) -> Maps:
        """Fit on caches of the same documents; a column of Y is a regression of its own."""
        n_layers, weights = len(target[0][0]), []
        for layer in range(n_layers):
            x = np.concatenate([features(c, layer, n_layers, around) for c in source])
            k, v = (np.concatenate([_wide(c[side][layer]) for c in target]) for side in (0, 1))
            weights.append((ridge(x, k, penalty), ridge(x, v, penalty)))
        k, v = (np.concatenate([c[i] for c in target], axis=2) for i in (0, 1))
        means = k.mean(axis=2, keepdims=True), v.mean(axis=2, keepdims=True)
        return cls(weights, means, around)

    def apply(self, cache: tuple[Side, Side], like: tuple[Side, Side]) -> tuple[Side, Side]:
        """Return the target's K, not rotated, and V of a source's cache."""
        out = []
        for side in (0, 1):
            heads, tokens, dim = like[side].shape[1:]
            made = [
                features(cache, layer, len(self.weights), self.around) @ both[side]
                for layer, both in enumerate(self.weights)
            ]
            shaped = [m.reshape(tokens, heads, dim).transpose(1, 0, 2) for m in made]
            out.append(np.stack(shaped).astype(np.float32))
        return out[0], out[1]


def _wide(side: np.ndarray) -> np.ndarray:
    """Return [tokens, heads · head_dim] of [heads, tokens, head_dim]."""
    return side.transpose(1, 0, 2).reshape(side.shape[1], -1).astype(np.float64)


def log_probs(model: Any, cache: tuple[Side, Side], fed: list[int]) -> np.ndarray:
    """Return the log-probabilities [tokens, vocabulary] of a model that goes on from a cache."""
    layers: list[Any] = []
    for k, v in zip(rotated(model, cache[0], 1), cache[1], strict=True):
        layers.append(KVCache())
        layers[-1].update_and_fetch(mx.array(k)[None], mx.array(v)[None])
    logits = np.array(model(mx.array([fed]), cache=layers)[0].astype(mx.float32), dtype=np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def error(made: Side, exact: Side) -> float:
    """Return ‖X - X'‖_F / ‖X‖_F, the mean over layers and heads."""
    miss, size = (np.linalg.norm(x, axis=(2, 3)) for x in (made - exact, exact))
    return float((miss / size).mean())


def _model(name: str, bits: int | None, seed: int) -> tuple[Any, Any]:
    """Return a model in fp32, its linear layers rounded to ``bits`` bits, and its tokenizer."""
    config = ModelConfig(name=name, source=name, seed=seed)
    info = models.describe(config, results_root())
    model, tokenizer = models.load(vars(info), "float32")
    for part in model.modules() if bits else ():
        if isinstance(part, nn.Linear):  # rounded, and dense again: quantized products are slow
            codes = mx.quantize(part.weight, group_size=32, bits=bits)
            part.weight = mx.dequantize(*codes, group_size=32, bits=bits)
    return model, tokenizer


def main() -> int:
    """Fit, measure on held-out documents, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("source", "target"):
        parser.add_argument(f"--{name}", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--source-bits", type=int, choices=(2, 3, 4, 8), help="weights' bits")
    parser.add_argument("--source-seed", type=int, default=1, help="of a tiny source (target: 0)")
    parser.add_argument("--tokens", type=int, default=512, help="of each document's prefill")
    parser.add_argument("--documents", type=int, default=8, help="fitted on; 4 more are held out")
    parser.add_argument("--around", type=int, default=1, help="source layers on either side")
    parser.add_argument("--penalty", type=float, default=1e-4)
    args = parser.parse_args()
    if args.source != args.target:
        parser.error("smollm2 and tiny have different tokenizers, so their caches do not align.")
    source, tokenizer = _model(args.source, args.source_bits, args.source_seed)
    target, _ = _model(args.target, None, 0)
    dataset = DatasetConfig(name="embedded", source="embedded", limit=args.documents + 4)
    texts = load_documents(dataset, seed=0)
    tokens = [tokenizer.encode(text.text)[: args.tokens + 33] for text in texts]
    prompts = [t[: args.tokens] for t in tokens]
    caches = [[cache_of(model, p) for p in prompts] for model in (source, target)]
    fitted_on = [c[: args.documents] for c in caches]
    maps = Maps.fit(fitted_on[0], fitted_on[1], args.around, args.penalty)
    print(f"fitted on {args.documents} documents, held out {len(texts) - args.documents}")
    print("| cache | K error | V error | KL |\n| --- | ---: | ---: | ---: |")
    held = range(args.documents, len(texts))
    made: dict[str, Any] = {
        "mean": lambda a, b: tuple(
            np.broadcast_to(m, x.shape) for m, x in zip(maps.means, b, strict=True)
        ),
        "source's own": lambda a, b: a if a[0].shape == b[0].shape else None,
        "transferred": maps.apply,
    }
    for name, make in made.items():
        _print_row(name, target, [(make(caches[0][i], caches[1][i]), caches[1][i]) for i in held],
                   [tokens[i][args.tokens :] for i in held])  # fmt: skip
    return 0


def _print_row(name: str, target: Any, pairs: list[Any], fed: list[list[int]]) -> None:
    """Print the mean errors of caches (made, exact) and the KL of what follows."""
    if pairs[0][0] is None:
        print(f"| {name} | - | - | - |")
        return
    k, v = (float(np.mean([error(m[i], e[i]) for m, e in pairs])) for i in (0, 1))
    divergence = []
    for (m, e), tokens in zip(pairs, fed, strict=True):
        own, other = (log_probs(target, c, tokens) for c in (e, m))
        divergence.append((np.exp(own) * (own - other)).sum(axis=-1).mean())
    print(f"| {name} | {k:.4f} | {v:.4f} | {float(np.mean(divergence)):.4f} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
