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


def values_need_fp32(values: mx.array) -> mx.array:
    """Rule for L, R, outlier values [batch, heads, ...]: overflow, or a head that is all tiny."""
    peak = mx.abs(values).max(axis=tuple(range(2, values.ndim)), keepdims=True)
    return overflows(values) | _any_per_row((peak > 0) & (peak < FP16_TINY))


class Store:
    """The stored arrays of one block while it is made, with the width each needs.

    ``add`` returns what a reader will see (fp32), ``finish`` the arrays in their final dtypes
    after one evaluation for all the flags of the block.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, mx.array] = {}
        self._wide: dict[str, mx.array] = {}

    def add(self, name: str, value: mx.array, wide: mx.array | None) -> mx.array:
        """Keep ``value`` under ``name``; ``wide`` [batch, 1, ...] says which rows need fp32.

        ``wide=None`` keeps an integer array as it is.
        """
        if wide is not None:
            value = mx.where(wide, value, value.astype(mx.float16).astype(mx.float32))
            self._wide[name] = wide.any()
        self.arrays[name] = value
        return value

    def finish(self, *extra: mx.array) -> dict[str, mx.array]:
        """Narrow every term that fits fp16 and evaluate; ``extra`` is evaluated along."""
        mx.eval(list(self._wide.values()), list(extra))
        for name, wide in self._wide.items():
            if not wide.item():
                self.arrays[name] = self.arrays[name].astype(mx.float16)
        mx.eval(list(self.arrays.values()))
        return self.arrays
