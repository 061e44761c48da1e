"""Convert the bundled SmolLM2 GGUF file to a dense float32 folder that ``mlx_lm`` loads.

``mx.load`` reads this file's types (Q4_1, Q8_0, F32) bit-exactly; of the others it reads Q4_K
wrongly without an error, so this is the recipe for one known file, not a general converter.
What the recipe adds to a renaming of tensors: the llama rotary layout is undone
(:func:`unpermute_rows`), the quantised triples are made dense, and config and tokenizer are
rebuilt from the file's metadata. MLX is imported on first use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

GROUP_SIZE = 32  # of Q4_1 and Q8_0
CONTROL_TOKEN = 3  # token_type of special tokens in the metadata
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def mlx_name(name: str) -> str:
    """Return MLX's name of a GGUF tensor: ``blk.3.attn_q.weight`` -> ``model.layers.3...weight``.

    Raises :class:`ValueError` for a name the recipe does not know.
    """
    stem, _, suffix = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{suffix}"
    block, _, part = stem.partition(".")[2].partition(".")
    if not stem.startswith("blk.") or part not in LAYER_NAMES:
        raise ValueError(f"tensor {name!r}: not part of a llama GGUF file with tied embeddings")
    return f"model.layers.{block}.{LAYER_NAMES[part]}.{suffix}"


def unpermute_rows(x: mx.array, n_heads: int) -> mx.array:
    """Reorder the rows of q_proj or k_proj from (head, half, 2) to (head, 2, half).

    GGUF stores llama's rotary pairs side by side; MLX rotates the two halves of a head against
    each other. It permutes whole rows, so it is right for dense and for packed rows alike.
    """
    half = x.shape[0] // n_heads // 2
    return x.reshape(n_heads, half, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _dense(tensors: dict[str, mx.array], stem: str) -> mx.array:
    """Return tensor ``stem`` as float32, dequantised where it has scales."""
    import mlx.core as mx

    weight = tensors[f"{stem}.weight"]
    if f"{stem}.scales" not in tensors:
        if weight.dtype != mx.float32:  # what MLX makes of F16, and wrongly of Q4_K and others
            raise ValueError(
                f"tensor {stem!r} is {weight.dtype}: expected Q4_1, Q8_0 or F32, which MLX reads"
                " exactly. Next: convert the model itself with mlx_lm.convert."
            )
        return weight
    scales = tensors[f"{stem}.scales"].astype(mx.float32)
    biases = tensors[f"{stem}.biases"].astype(mx.float32)
    bits = weight.shape[1] * 32 // (scales.shape[1] * GROUP_SIZE)
    return mx.dequantize(weight, scales, biases, group_size=GROUP_SIZE, bits=bits)


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return config.json's content from the GGUF metadata (llama keys)."""

    def number(key: str) -> Any:
        return meta[key].item()

    heads = number("llama.attention.head_count")
    hidden = number("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": number("llama.context_length"),
        # the metadata's float32 value, at the precision it was written with
        "rms_norm_eps": float(f"{number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": number("llama.rope.freq_base"),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` as indented UTF-8 JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, meta: dict[str, Any], config: dict[str, Any]) -> None:
    """Rebuild tokenizer.json (byte-level BPE, pre-tokenizer ``smollm``) and its config."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = meta["tokenizer.ggml.token_type"].tolist()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"].item()],
            "chat_template": meta["tokenizer.chat_template"],
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )


def convert(gguf: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of ``gguf`` into the existing empty ``folder``.

    Takes about 5 s and 1.2 GB of memory on two CPU cores.
    """
    import mlx.core as mx

    # The CPU on every platform: the same float32 bytes, hence the same weight hash, everywhere.
    with mx.stream(mx.cpu):
        # its annotation lists every file format's result; GGUF gives arrays and metadata by name
        loaded: Any = mx.load(str(gguf), return_metadata=True)
        tensors, meta = loaded
        config = model_config(meta)
        heads = {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }
        dense = {}
        for stem in sorted(n.removesuffix(".weight") for n in tensors if n.endswith(".weight")):
            x = _dense(tensors, stem)
            part = stem.rpartition(".")[2]
            if part in heads:
                x = unpermute_rows(x, heads[part])
            dense[mlx_name(f"{stem}.weight")] = x
        mx.save_safetensors(str(folder / "model.safetensors"), dense, metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_tokenizer(folder, meta, config)
