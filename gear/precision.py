"""Which precision a stored term gets: fp16, unless fp16 would lose it (then fp32, counted so).

All arithmetic is fp32. Every later step must see the *stored* form of the earlier ones, so a term
is rounded here, in the graph, and its array is narrowed only when the block is finished. The
choice is made per batch row (a row must not depend on its neighbours); the array has one dtype.
"""

from __future__ import annotations

import mlx.core as mx

FP16_OVERFLOW = 65520.0  # the smallest magnitude that rounds to inf in fp16
FP16_TINY = 2.0**-14  # below it fp16 is subnormal and loses relative precision


def _any_per_row(flags: mx.array) -> mx.array:
    """Reduce flags [batch, ...] to [batch, 1, ...]."""
    return flags.any(axis=tuple(range(1, flags.ndim)), keepdims=True)


def overflows(x: mx.array) -> mx.array:
    """Say per row whether fp16 would turn a finite entry of ``x`` into inf."""
    return _any_per_row(mx.abs(x) >= FP16_OVERFLOW)


def scale_needs_fp32(scale: mx.array) -> mx.array:
    """Rule for scales: overflow, or a nonzero scale below 2^-14."""
    size = mx.abs(scale)
    return overflows(scale) | _any_per_row((size > 0) & (size < FP16_TINY))


def zero_needs_fp32(zero: mx.array, scale: mx.array) -> mx.array:
    """Rule for zeros: overflow, or rounding one moves it by more than scale / 8."""
    moved = mx.abs(zero.astype(mx.float16).astype(mx.float32) - zero)
    return overflows(zero) | _any_per_row(moved > mx.abs(scale) / 8)


def grid_needs_fp32(step: mx.array, low: mx.array) -> mx.array:
    """Rule for a grid's step and low: the scale's, and no low lost that is more than a step."""
    lost = (mx.abs(low) > step) & (mx.abs(low) < FP16_TINY)
    return scale_needs_fp32(step) | overflows(low) | _any_per_row(lost)


def values_need_fp32(values: mx.array) -> mx.array:
    """Rule for L, R, outlier values [batch, heads, ...]: overflow, or a head that is all tiny."""
    peak = mx.abs(values).max(axis=tuple(range(2, values.ndim)), keepdims=True)
    return overflows(values) | _any_per_row((peak > 0) & (peak < FP16_TINY))


Terms = dict[str, mx.array]


class Store:
    """The stored terms of one block while its graph is built. Nothing is evaluated here.

    ``arrays`` holds each term as a reader will see it (fp32, or integers); every floating term is
    also in ``narrow`` as fp16, and ``wide`` says whether it needs fp32 after all.
    """

    def __init__(self) -> None:
        self.arrays: Terms = {}
        self.narrow: Terms = {}
        self.wide: Terms = {}

    def add(self, name: str, value: mx.array, wide: mx.array | None) -> mx.array:
        """Keep ``value`` under ``name``; ``wide`` [batch, 1, ...] says which rows need fp32.

        ``wide=None`` keeps an integer array as it is.
        """
        if wide is not None:
            self.narrow[name] = value.astype(mx.float16)
            value = mx.where(wide, value, self.narrow[name].astype(mx.float32))
            self.wide[name] = wide.any()
        self.arrays[name] = value
        return value


def narrowed(arrays: Terms, narrow: Terms, wide: Terms) -> Terms:
    """Return the terms in their final dtypes: fp16 wherever ``wide`` does not object."""
    return {n: a if n not in wide or wide[n].item() else narrow[n] for n, a in arrays.items()}


def cast(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return fp32 x in ``dtype``; its largest entries may lie a rounding step beyond: never inf."""
    most = mx.finfo(dtype).max
    return mx.clip(x, -most, most).astype(dtype)
