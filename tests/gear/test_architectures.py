"""GearCache under tiny random models of other shapes, dtypes and layer kinds, built in code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import falcon_h1, gemma3_text, lfm2, llama, mamba, minicpm3
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

import gear
from evals.caches import Caches, make_caches
from gear import GearConfig, resolve
from gear.cache import GearCache
from gear.methods.gear import Gear
from tests.gear.letters import PROMPT, Letters, generate, make_model

CALLS = [130, 60, 1, 1, 1, 1]  # a prefill block of 128 tokens, then a decode block of 64
FINE = GearConfig(bits=8, rank=4, sparse_frac=0.02)
COARSE = GearConfig(bits=2, rank=0, rank_decode=0, sparse_frac=0.0)
TOLERANCE = {mx.float32: 0.01, mx.float16: 0.01, mx.bfloat16: 0.03}  # of the logits' norm
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def _seeded(model: Any, dtype: mx.Dtype = mx.float32) -> Any:
    """Return the model with weights that make the next token depend on its cache."""
    mx.random.seed(0)
    weights = []
    for name, old in tree_flatten(model.parameters()):
        if old.ndim == 2:
            gain = 1.7 if "q_proj" in name or "k_proj" in name else 1.0
            scale = 1.0 if "embed" in name else gain / old.shape[1] ** 0.5
            weights.append((name, scale * mx.random.normal(old.shape)))
    model.load_weights(weights, strict=False)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def _llama(head_dim: int = 64, dtype: mx.Dtype = mx.float32, **sizes: int) -> Any:
    arguments = {**SIZES, "head_dim": head_dim, **sizes}
    return _seeded(
        llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, **arguments)), dtype
    )


def _gemma3() -> Any:
    arguments = gemma3_text.ModelArgs(
        model_type="gemma3_text", **{**SIZES, "num_hidden_layers": 4}, head_dim=64,
        query_pre_attn_scalar=64, sliding_window=32, sliding_window_pattern=2,
    )  # fmt: skip
    return _seeded(gemma3_text.Model(arguments))


def _lfm2() -> Any:
    arguments = lfm2.ModelArgs(
        model_type="lfm2", **{**SIZES, "hidden_size": 128, "num_hidden_layers": 3},
        max_position_embeddings=1024, norm_eps=1e-5, conv_bias=False, conv_L_cache=3,
        block_dim=128, block_multiple_of=64, block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False, full_attn_idxs=[1],
    )  # fmt: skip
    return _seeded(lfm2.Model(arguments))


def _minicpm3() -> Any:
    """Return a model whose K have 48 channels and V 32."""
    arguments = minicpm3.ModelArgs(
        model_type="minicpm3", **{**SIZES, "hidden_size": 128}, dim_model_base=128,
        rms_norm_eps=1e-5, q_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
        kv_lora_rank=64, scale_depth=1.4, scale_emb=1.0, max_position_embeddings=1024,
        rope_scaling={"short_factor": 1.0, "long_factor": 1.0},
    )  # fmt: skip
    return _seeded(minicpm3.Model(arguments))


def _mamba() -> Any:
    arguments = mamba.ModelArgs(
        model_type="mamba", vocab_size=256, hidden_size=64, intermediate_size=128, state_size=8,
        num_hidden_layers=2, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4,
    )  # fmt: skip
    return mamba.Model(arguments)


def _falcon_h1() -> Any:
    arguments = falcon_h1.ModelArgs(
        **{**SIZES, "num_hidden_layers": 2}, head_dim=16, mamba_d_ssm=64, mamba_d_head=16,
        mamba_n_heads=4, mamba_d_state=16,
    )  # fmt: skip
    return falcon_h1.Model(arguments)


MODELS: dict[str, tuple[Callable[[], Any], list[type]]] = {
    **{
        f"head_dim {d}": (lambda d=d: _llama(d), [GearCache] * 2)
        for d in (64, 80, 96, 128, 256)
    },
    "one KV head": (lambda: _llama(num_key_value_heads=1), [GearCache] * 2),
    "a KV head per head": (lambda: _llama(num_key_value_heads=4), [GearCache] * 2),
    "float16": (lambda: _llama(dtype=mx.float16), [GearCache] * 2),
    "bfloat16": (lambda: _llama(80, mx.bfloat16), [GearCache] * 2),
    "K wider than V": (_minicpm3, [GearCache] * 2),
    "sliding windows": (_gemma3, [RotatingKVCache, GearCache] * 2),
    "convolutions": (_lfm2, [ArraysCache, GearCache, ArraysCache]),
}  # fmt: skip


def _logits(model: Any, caches: list[Any]) -> mx.array:
    """Return the logits [tokens, vocabulary] of all calls but the first, which sees no past."""
    out, start = [], 0
    for n in CALLS:
        out.append(model(mx.array([PROMPT + PROMPT])[:, start : start + n], cache=caches)[0])
        mx.eval(out[-1])
        start += n
    return mx.concatenate(out[1:])


def _run(model: Any, config: GearConfig) -> tuple[mx.array, Caches]:
    caches = make_caches(model, Gear(config))
    return _logits(model, caches.layers), caches


def _distance(logits: mx.array, exact: mx.array) -> float:
    """Return ‖logits - exact‖ / ‖exact‖."""
    one, other = logits.astype(mx.float32), exact.astype(mx.float32)
    return (mx.linalg.norm(one - other) / mx.linalg.norm(other)).item()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_runs_compressed_and_close_to_exact(name: str) -> None:
    build, kinds = MODELS[name]
    model = build()
    native = model.make_cache() if hasattr(model, "make_cache") else [KVCache() for _ in kinds]
    exact = _logits(model, native)
    fine, caches = _run(model, FINE)
    assert [type(c) for c in caches.layers] == kinds
    covered = [c for c in caches.layers if type(c) is GearCache]
    assert caches.coverage == {
        "layers": len(kinds),
        "covered_layers": len(covered),
        "packed_layers": 0,
    }
    assert [c.tokens_compressed for c in covered] == [192] * len(covered)
    assert [[s.prefill for s in c.segments] for c in covered] == [[True, False]] * len(covered)
    assert mx.all(mx.isfinite(fine)).item()
    assert fine.dtype == exact.dtype
    assert {a.dtype for c in covered for a in c.reconstruct()} == {exact.dtype}
    error, coarse = (_distance(x, exact) for x in (fine, _run(model, COARSE)[0]))
    print(f"{name}: 8 bits {error:.1e}, 2 bits {coarse:.1e}")
    assert error < TOLERANCE[exact.dtype]
    assert coarse > 10 * error  # so the cache is what was seen


@pytest.mark.parametrize(("dims_k", "dims_v"), [(64, 128), (192, 128), (80, 48)])
def test_k_and_v_of_different_head_dims(dims_k: int, dims_v: int) -> None:
    cache = GearCache(resolve(FINE, 1)[0])
    keys, values = (
        mx.random.normal((2, 3, sum(CALLS), d), key=mx.random.key(d)) for d in (dims_k, dims_v)
    )
    start = 0
    for n in CALLS:
        cache.update_and_fetch(keys[:, :, start : start + n], values[:, :, start : start + n])
        start += n
    assert cache.tokens_compressed == 192
    for seen, given in zip(cache.reconstruct(), (keys, values), strict=True):
        assert seen.shape == given.shape
        assert 0 < mx.abs(seen - given).max().item() < 0.03


def test_layers_that_keep_their_cache_count_in_full() -> None:
    caches = _run(_gemma3(), GearConfig())[1]
    rows = caches.bytes()["per_layer"]
    assert [row["covered"] for row in rows] == [False, True, False, True]
    for row in rows:
        assert (row["stored_bytes"] < 0.5 * row["fp16_bytes"]) == row["covered"]
        assert row["stored_bytes"] <= row["fp16_bytes"]


@pytest.mark.parametrize(
    ("build", "kind"), [(_mamba, "mamba.Model.*ArraysCache"), (_falcon_h1, "falcon_h1.*CacheList")]
)
def test_a_model_without_a_plain_cache_is_refused(build: Callable[[], Any], kind: str) -> None:
    with (
        pytest.raises(ValueError, match=f"{kind}.*nothing would be compressed"),
        gear.compressed(build(), GearConfig()),
    ):
        pass


def test_the_pass_itself_sees_what_attend_compressed_stores() -> None:
    model, prompt = make_model(), mx.array([PROMPT])
    exact = model(prompt, cache=make_caches(model, Gear(GearConfig())).layers)
    assert mx.array_equal(exact, model(prompt, cache=[KVCache(), KVCache()]))
    config = GearConfig(attend="compressed")
    with gear.compressed(model, config):
        caches = model.make_cache()
        mx.eval(model(prompt[:, :-1], cache=caches))
        assert [c.tokens_compressed for c in caches] == [128, 128]
        tokens, call = [], prompt[:, -1:]
        for _ in range(20):
            call = mx.argmax(model(call, cache=caches)[:, -1:], axis=-1)
            tokens.append(int(call.item()))
        text = generate(model)
    assert Letters().encode(text) == tokens
    assert _distance(model(prompt, cache=make_caches(model, Gear(config)).layers), exact) > 0.01
