"""Model files for tests, made in code: a GGUF file in llama.cpp's row order, and its model."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 16
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> list[str]:
    """Three control tokens, the 256 byte symbols, and one merged token."""
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]


def small_llama() -> Model:
    """A llama with tied embeddings whose norms are not all one, float32."""
    hidden = HEADS * HEAD_DIM
    arguments = ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=LAYERS,
        intermediate_size=2 * hidden,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        vocab_size=len(vocabulary()),
        rope_theta=100000.0,
    )
    model = Model(arguments)
    rng = np.random.default_rng(0)
    shapes = [(name, p.shape) for name, p in tree_flatten(model.parameters())]
    model.load_weights(
        [(n, mx.array(rng.normal(0.5, 0.3, s).astype(np.float32))) for n, s in shapes]
    )
    return model


def stored_order(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Put each head's rotary pairs (i, half + i) side by side, as llama.cpp's converter does."""
    stored = np.empty_like(rows)
    size = len(rows) // n_heads
    for head in range(n_heads):
        for i in range(size // 2):
            stored[head * size + 2 * i] = rows[head * size + i]
            stored[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return stored


def write_gguf(path: Path, model: Model) -> None:
    """Write ``model`` as a llama GGUF file with a byte-level BPE tokenizer."""
    arrays = {}
    for name, value in tree_flatten(model.parameters()):
        stem = name.removesuffix(".weight")
        rows = np.array(value)
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            stored = GGUF_NAMES[part]
            if stored in ("attn_q", "attn_k"):
                rows = stored_order(rows, HEADS if stored == "attn_q" else KV_HEADS)
            arrays[f"blk.{layer}.{stored}.weight"] = mx.array(rows)
        else:
            arrays[f"{GGUF_NAMES[stem]}.weight"] = mx.array(rows)
    tokens = vocabulary()
    kinds = [3 if t in SPECIAL else 1 for t in tokens]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": mx.array(LAYERS, mx.uint32),
        "llama.context_length": mx.array(512, mx.uint32),
        "llama.embedding_length": mx.array(HEADS * HEAD_DIM, mx.uint32),
        "llama.feed_forward_length": mx.array(2 * HEADS * HEAD_DIM, mx.uint32),
        "llama.attention.head_count": mx.array(HEADS, mx.uint32),
        "llama.attention.head_count_kv": mx.array(KV_HEADS, mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.rope.freq_base": mx.array(100000.0, mx.float32),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.token_type": mx.array(kinds, mx.int32),
        "tokenizer.ggml.bos_token_id": mx.array(1, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(2, mx.uint32),
        "tokenizer.ggml.padding_token_id": mx.array(2, mx.uint32),
        "tokenizer.ggml.unknown_token_id": mx.array(0, mx.uint32),
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    mx.save_gguf(str(path), arrays, metadata)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 tensors in the safetensors format, by its specification."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in tensors.items():
        raw = value.astype("<f4").tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
