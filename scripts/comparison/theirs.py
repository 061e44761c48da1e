"""veloxquant-mlx's side, through the classes that its documentation names.

Caches for mlx-lm come from ``KVCacheFactory``, get one prefill, and what ``update_and_fetch``
returns is their reconstruction. Those of vectors (``STANDALONE_METHODS``) have no reader of keys:
their quantizer's ``encode`` and ``decode`` give the error, a filled cache the bytes.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from comparison.data import SEED, Sample
from comparison.found import Found, bits, held_bytes, lost_share, relative_error

PACKAGE = "veloxquant-mlx"
TESTED = "0.94.15"
Measure = Callable[[Sample], Found]


class Missing(RuntimeError):
    """The package is not installed."""


def installed() -> str:
    """Return the package's version. Raises :class:`Missing`, which says how to get it."""
    try:
        import_module("veloxquant_mlx")
        return version(PACKAGE)
    except ImportError as error:
        raise Missing(
            f"{PACKAGE} is not installed. It is optional: pip install {PACKAGE}=={TESTED}"
        ) from error


def _made(method: str, head_dim: int, **fields: Any) -> Any:
    """Return a cache of theirs."""
    base = import_module("veloxquant_mlx.cache.base")
    config = base.KVCacheConfig(method=method, head_dim=head_dim, seed=SEED, **fields)
    return base.KVCacheFactory.create(config)


def cache(method: str, options: str, claims: tuple[str, ...] = (), **fields: Any) -> Measure:
    """Return what measures an mlx-lm cache; ``options`` is its class of options.

    ``claims`` name two properties, bytes of K and of V, where they are not the usual ones.
    """
    return partial(_cache, method, options, claims, fields)


def _cache(
    method: str, options: str, claims: tuple[str, ...], fields: dict[str, Any], sample: Sample
) -> Found:
    """Fill a cache with one prefill."""
    kind = getattr(import_module("veloxquant_mlx.cache.options"), options)
    own = {name: value for name, value in fields.items() if name in kind.__annotations__}
    rest = {name: value for name, value in fields.items() if name not in own}
    made = _made(method, sample.shape[2], options=kind(**own), **rest)
    rebuilt = made.update_and_fetch(*sample.exact)
    mx.eval(rebuilt)
    k_error, v_error = map(relative_error, sample.exact, rebuilt)
    names = claims or ("compressed_key_bytes", "compressed_value_bytes")
    k, v = (bits(getattr(made, name), sample, 1 + (names[0] == names[1])) for name in names)
    return Found(k_error, v_error, k, v, bits(held_bytes(made), sample, 2))


def vecinfer(key_bits: int, key_dims: int, value_bits: int, value_dims: int) -> Measure:
    """Return what measures vecinfer with codebooks that its own trainer fits on the other text."""

    def measure(sample: Sample) -> Found:
        fitting = import_module("veloxquant_mlx.allocators.vecinfer")
        keys, values = (x.astype(mx.float32) for x in sample.other)
        smooth = fitting.calibrate_smooth_factors(keys[0].swapaxes(0, 1))
        hadamard = fitting.walsh_hadamard_matrix(sample.shape[2], dtype=mx.float32)
        turned = fitting.apply_dual_transform_keys(keys, smooth, hadamard)
        train = partial(fitting.train_codebook, seed=SEED)
        return cache(
            "vecinfer", "VecInferOptions", key_sub_dim=key_dims, value_sub_dim=value_dims,
            key_codebook_bits=key_bits, value_codebook_bits=value_bits, smooth_factors=smooth,
            key_codebook=train(turned.reshape(-1, key_dims), 2**key_bits),
            value_codebook=train(values.reshape(-1, value_dims), 2**value_bits),
        )(sample)  # fmt: skip

    return measure


def evicting(method: str, options: str, **fields: Any) -> Measure:
    """Return what measures a cache that keeps some tokens of each head and drops the others."""

    def measure(sample: Sample) -> Found:
        kind = getattr(import_module("veloxquant_mlx.cache.options"), options, None)
        own = {"options": kind(**fields)} if kind else fields
        made = _made(method, sample.shape[2], **own)
        made.update_and_fetch(*sample.exact)  # returns all: what it keeps is for the next call
        kept = made.keys, made.values
        size = bits(getattr(made, f"{method}_kept_bytes"), sample, 2)
        k_error, v_error = map(lost_share, sample.exact, kept)
        return Found(k_error, v_error, size, size, bits(held_bytes(made), sample, 2))

    return measure


def vectors(method: str, quantizer: str, unit: bool, **fields: Any) -> Measure:
    """Return what measures a cache of single vectors: keys by ``quantizer``, values in int8.

    ``unit``: the cache scales keys to length 1 and keeps the length.
    """

    def measure(sample: Sample) -> Found:
        heads, tokens, head_dim = sample.shape
        one = _made(method, head_dim, capacity=tokens, **fields)
        for key, value in zip(*(x[0, 0] for x in sample.exact), strict=True):
            one.append_key(key)
            one.append_value(value)
        claimed, values = one.memory_bytes(), tokens * (head_dim + 2)
        module, _, name = quantizer.rpartition(".")
        kind = getattr(import_module(f"veloxquant_mlx.quantizers.{module}"), name)
        width = {"m": fields["jl_dim"]} if "jl_dim" in fields else {}
        own = kind(d=head_dim, b=fields.get("bit_width_inlier", 1), seed=SEED, **width)
        keys = sample.exact[0].reshape(-1, head_dim)
        length = mx.linalg.norm(keys.astype(mx.float32), axis=-1, keepdims=True)
        coded = own.encode((keys / length).astype(mx.float16) if unit else keys)
        rebuilt = own.decode(coded).astype(mx.float32) * (length if unit else 1)
        return Found(
            relative_error(sample.exact[0], rebuilt.reshape(sample.exact[0].shape)),
            _int8_error(sample.exact[1]),
            bits(heads * (claimed - values), sample),
            bits(heads * values, sample),
            bits(heads * held_bytes(one), sample, 2),
        )

    return measure


def _int8_error(values: mx.array) -> float:
    """Return the error of their caches' values: int8 with one fp16 scale a token, max / 127."""
    x = values.astype(mx.float32)
    scale = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True) / 127, 1e-8)
    codes = mx.clip(mx.round(x / scale), -127, 127)
    return relative_error(values, codes * scale.astype(mx.float16))


def rabitq(clusters: int) -> Measure:
    """Return what measures their quantizer of keys; each head has one, fitted on its own keys."""

    def measure(sample: Sample) -> Found:
        heads, _, head_dim = sample.shape
        kind = import_module("veloxquant_mlx.quantizers.rabitq").RaBitQQuantizer
        rebuilt, held, ratio = [], 0, math.nan
        for head in range(heads):
            keys, one = sample.exact[0][0, head], kind(d=head_dim, nlist=clusters, seed=SEED)
            with contextlib.redirect_stdout(io.StringIO()):  # it prints the size of its k-means
                one.fit(keys)
            coded = one.encode(keys)
            rebuilt.append(one.decode(coded))
            held += held_bytes([one, coded])
            ratio = one.compression_ratio
        error = relative_error(sample.exact[0], mx.stack(rebuilt)[None])
        return Found(error, None, 16 / ratio, None, bits(held, sample))

    return measure
