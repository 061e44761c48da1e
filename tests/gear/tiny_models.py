"""Tiny random models of mlx-lm's families, for tests of how attention reaches a cache.

`SIZES` is what all of them share; a family adds what only its own ``ModelArgs`` asks for. mlx-lm
loads Mistral's checkpoints with llama.py; ministral3.py and mixtral.py stand for the rest of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 257,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5, "max_position_embeddings": 1024, "rope_theta": 10000.0,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_intermediate_size": 32,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}  # fmt: skip
_SLIDING = {"num_hidden_layers": 4, "sliding_window": 32, "sliding_window_pattern": 2}
_SCALES = {
    "logits_scaling": 1.0, "attention_multiplier": 32**-0.5, "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}  # fmt: skip

PACKED: dict[str, dict[str, Any]] = {
    "apertus": {"post_norm": True, "qk_norm": True},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, **_SLIDING},
    "ernie4_5": {"use_bias": False},
    "exaone4": {**_SLIDING, "sliding_window_pattern": "LG", "rope_scaling": None},
    "gemma": {},
    "gemma3_text": {"query_pre_attn_scalar": 32, **_SLIDING},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
    "gpt_oss": {"sliding_window": 32, **_EXPERTS},  # with attention sinks
    "granite": _SCALES,
    "llama": {},
    "llama4_text": {"intermediate_size_mlp": 64, "no_rope_layers": [1, 0], "use_qk_norm": True},
    "minicpm3": {
        **_LATENT, "dim_model_base": 128, "scale_depth": 1.4, "scale_emb": 1.0,
        "rope_scaling": {"short_factor": 1.0, "long_factor": 1.0},
    },  # K are wider than V
    "ministral3": {
        "rope_parameters": {
            "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
    "mixtral": _EXPERTS,
    "olmo2": {},
    "olmoe": _EXPERTS,
    "phi": {"num_key_value_heads": 4},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {
        **_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"use_qkv_bias": False, "partial_rotary_factor": 0.25},
    "starcoder2": {},
}  # fmt: skip
"""Families all of whose plain layers pass K and V on to attention untouched."""

DENSE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_LATENT, **_EXPERTS},  # projects its latent K and V again
    "gemma2": {"query_pre_attn_scalar": 32.0},  # caps its scores by hand
    "plamo2": {"hidden_size_per_head": 32, "mamba_enabled": False},  # calls mx.fast by itself
}
"""Families that do something else with K and V, and so keep the dense way."""


def build(family: str, seed: int = 0) -> Any:
    """Return a random model of mlx_lm/models/``family``.py whose next token needs its cache."""
    module = import_module(f"mlx_lm.models.{family}")
    own = {**SIZES, "model_type": family, **(PACKED | DENSE)[family]}
    model = module.Model(module.ModelArgs.from_dict(own))
    mx.random.seed(seed)
    weights = []
    parameters: Any = tree_flatten(model.parameters())
    for name, old in parameters:
        if old.ndim == 2:
            gain = 1.7 if "q_proj" in name or "k_proj" in name else 1.0
            scale = 1.0 if "embed" in name else gain / old.shape[1] ** 0.5
            weights.append((name, scale * mx.random.normal(old.shape)))
        elif name.endswith("sinks"):
            weights.append((name, mx.random.normal(old.shape)))
    model.load_weights(weights, strict=False)
    mx.eval(model.parameters())
    return model.eval()
