"""evals.gguf_convert: names and the order of rows (the whole conversion is in test_assets)."""

import mlx.core as mx
import numpy as np
import pytest

from evals import gguf_convert
from tests.evals import model_files


def test_rows_are_unpermuted():
    stored = mx.array([[0], [4], [1], [5], [2], [6], [3], [7]])
    assert gguf_convert.unpermute_rows(stored, 1).flatten().tolist() == list(range(8))
    rows = np.arange(3 * 8 * 5).reshape(24, 5)
    found = gguf_convert.unpermute_rows(mx.array(model_files.stored_order(rows, 3)), 3)
    assert np.array_equal(np.array(found), rows)


@pytest.mark.parametrize(
    ("gguf", "mlx"),
    [
        ("token_embd.scales", "model.embed_tokens.scales"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_names(gguf, mlx):
    assert gguf_convert.mlx_name(gguf) == mlx


@pytest.mark.parametrize("name", ["output.weight", "blk.0.attn_q_norm.weight", "v.blk.0.attn_q.w"])
def test_an_unknown_tensor_is_refused(name):
    with pytest.raises(ValueError, match=name):
        gguf_convert.mlx_name(name)
