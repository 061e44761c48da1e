"""``model=tiny``: a random llama built in code, and its byte tokenizer. No download, no file.

Plain random weights make attention almost uniform, and then a broken cache changes nothing. Here
queries and keys are scaled so that scores spread over several nats, which makes the next-token
distribution depend on the cached keys and values. What it says is noise; what it tests is not.
MLX is imported on first use.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

BOS = 256
RECIPE = 1  # raise it when the same sizes and seed give other weights
SIZES = ("layers", "heads", "kv_heads", "head_dim", "vocab_size", "seed")


class ByteTokenizer:
    """UTF-8 bytes as tokens 0..255 and a BOS, 256; larger ids (a larger vocabulary) are no text."""

    bos_token_id: int = BOS
    eos_token_id: int | None = None

    def encode(self, text: str) -> list[int]:
        """Return one token per UTF-8 byte, without BOS."""
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        """Return the text of the byte tokens; bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < BOS).decode("utf-8", errors="replace")


def weights_hash(sizes: dict[str, int]) -> str:
    """Return the hash that stands for the weights: they follow from recipe, sizes and seed."""
    content = json.dumps({"recipe": RECIPE, **sizes}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def count_weights(sizes: dict[str, int]) -> int:
    """Return the number of weights of the model that :func:`build` makes."""
    hidden = sizes["heads"] * sizes["head_dim"]
    kv = sizes["kv_heads"] * sizes["head_dim"]
    attention, mlp, norms = 2 * hidden * (hidden + kv), 3 * hidden * 2 * hidden, 2 * hidden
    layers = sizes["layers"] * (attention + mlp + norms)
    return 2 * sizes["vocab_size"] * hidden + layers + hidden


def _scale(name: str, fan_in: int) -> float:
    """Return the standard deviation of a weight matrix with ``fan_in`` columns."""
    if "embed_tokens" in name:
        return 1.0
    gain = 1.7 if "q_proj" in name or "k_proj" in name else 1.0
    # lm_head: logits spread over about 2 nats, so a distribution has something to lose
    return (2.0 if "lm_head" in name else gain) / math.sqrt(fan_in)


def build(sizes: dict[str, int]) -> nn.Module:
    """Return the model for ``sizes`` (the keys of SIZES), float32, equal for equal sizes."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    hidden = sizes["heads"] * sizes["head_dim"]
    arguments: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "vocab_size": sizes["vocab_size"],
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    model = Model(ModelArgs(**arguments))
    parameters: Any = tree_flatten(model.parameters())
    matrices = sorted((name, p.shape) for name, p in parameters if p.ndim == 2)
    weights: list[tuple[str, mx.array]] = []
    # The CPU everywhere: one generator, so the hash of sizes and seed names the same weights.
    with mx.stream(mx.cpu):
        for index, (name, shape) in enumerate(matrices):
            key = mx.random.key(sizes["seed"] * len(matrices) + index)
            x = mx.random.normal(shape, key=key) * _scale(name, shape[1])
            weights.append((name, x))
        mx.eval([x for _, x in weights])
    model.load_weights(weights, strict=False)  # the norms stay at one
    return model.eval()
