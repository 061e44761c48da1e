"""The K and V that both packages get: Gaussian with outlier channels, or a model's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np

from evals import models
from evals.data import load_documents
from evals.prefill import PrefillState, exact_prefill
from evals.record import results_root
from evals.schema import DatasetConfig, ModelConfig

SEED = 0
HEADS, HEAD_DIM, QUERIES = 4, 64, 32
OUTLIER_CHANNELS, OUTLIER_SIZE = 4, 8.0
LAYERS = 3
Pair = tuple[mx.array, mx.array]


@dataclass(frozen=True)
class Sample:
    """K and V [1, heads, tokens, head_dim] in fp16, and what some methods need beside them."""

    name: str
    exact: Pair
    other: Pair
    """K and V of another draw or text: what is calibrated is calibrated on it."""
    queries: mx.array
    """The last QUERIES queries [1, query heads, n, head_dim], times the scale."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return heads, tokens, head_dim."""
        _, heads, tokens, head_dim = self.exact[0].shape
        return heads, tokens, head_dim


def gaussian(tokens: int) -> Sample:
    """Return a seeded draw of N(0, 1), some channels of K of every head OUTLIER_SIZE times it."""
    draw = np.random.default_rng(SEED)
    size = np.ones((HEADS, 1, HEAD_DIM))
    for head in range(HEADS):
        size[head, 0, draw.choice(HEAD_DIM, OUTLIER_CHANNELS, replace=False)] = OUTLIER_SIZE

    def drawn(n: int, scale: np.ndarray | float = 1.0) -> mx.array:
        x = draw.standard_normal((1, HEADS, n, HEAD_DIM)) * scale
        return mx.array(x.astype(np.float16))

    exact = drawn(tokens, size), drawn(tokens)
    other = drawn(tokens, size), drawn(tokens)
    return Sample("gaussian", exact, other, drawn(QUERIES) / HEAD_DIM**0.5)


def real(tokens: int) -> Iterator[Sample]:
    """Yield some layers' K and V of a prefill of the bundled model over an embedded text.

    Raises :class:`evals.models.ModelError` where the model has not been fetched.
    """
    info = models.describe(ModelConfig(name="smollm2", source="smollm2"), results_root())
    model, tokenizer = models.load(asdict(info), "float32")
    texts = load_documents(DatasetConfig("embedded", "embedded", limit=2), SEED)
    first, second = (
        exact_prefill(model, tokenizer.encode(text.text)[:tokens], 512, window=QUERIES)
        for text in texts
    )
    for index in np.linspace(0, info.n_layers - 1, LAYERS).astype(int).tolist():
        sides = _fp16(first, index), _fp16(second, index)
        yield Sample(info.name, *sides, first.queries[index])


def _fp16(state: PrefillState, layer: int) -> Pair:
    """Return a layer's K and V as a cache in fp16 would get them."""
    keys, values = state.layers[layer].keys_and_values()
    return keys.astype(mx.float16), values.astype(mx.float16)
