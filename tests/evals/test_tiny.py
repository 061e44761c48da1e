"""evals.tiny: deterministic, sensitive to what is cached, and a tokenizer that loses nothing."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from evals import tiny

SIZES = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab_size": 257, "seed": 0}


def logprobs(tokens: list[int]) -> mx.array:
    logits = tiny.build(SIZES)(mx.array([tokens]))[0]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def test_equal_sizes_give_equal_weights_and_another_seed_others():
    one, two = (dict(tree_flatten(tiny.build(SIZES).parameters())) for _ in range(2))
    other = dict(tree_flatten(tiny.build({**SIZES, "seed": 1}).parameters()))
    assert all(mx.array_equal(one[name], two[name]) for name in one)
    matrices = [name for name, value in one.items() if value.ndim == 2]
    assert not any(mx.array_equal(one[name], other[name]) for name in matrices)
    first = one["lm_head.weight"][0, :3].tolist()
    assert first == pytest.approx([0.08876, -0.19147, -0.16831], abs=1e-4), "raise tiny.RECIPE"


def test_the_hash_follows_sizes_and_seed():
    hashes = {tiny.weights_hash({**SIZES, key: SIZES[key] + 1}) for key in SIZES}
    assert len(hashes | {tiny.weights_hash(SIZES)}) == len(SIZES) + 1
    assert tiny.weights_hash(dict(reversed(SIZES.items()))) == tiny.weights_hash(SIZES)


def test_predictions_depend_on_distant_tokens():
    """Else a broken cache would change nothing. Measured in nats over the last 64 positions."""
    tokens = list(("All happy families are alike. " * 10).encode())[:256]
    near = logprobs(tokens[128:])[-64:]
    far = logprobs(tokens)[-64:]
    assert mx.sum(mx.exp(far) * (far - near), axis=-1).mean().item() > 0.1


def test_the_byte_tokenizer():
    tokenizer = tiny.ByteTokenizer()
    text = "naïve — 日本 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tiny.BOS, 104, 105, 300]) == "hi"
    assert tokenizer.decode([0xE6]) == "\ufffd"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, None)
