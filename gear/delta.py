"""Anchored codes: of every few tokens the first in 8 bits, the others as what it leaves of them.

    anchor = codes of x[0];  x[i] ~ anchor + codes of (x[i] - anchor), i = 1 … tokens - 1

Codes are min/max in groups of channels of one token and head (quantize.py). Outliers take no part
in a range and get code 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from gear.coarse import off_grid
from gear.outliers import Rows
from gear.pack import pack, unpack
from gear.precision import Store, scale_needs_fp32, zero_needs_fp32
from gear.quantize import decode, encode, min_max

ANCHOR_BITS = 8


@dataclass(frozen=True)
class _Marked(Rows):
    """Rows whose outliers are marked, because rows were taken out of a block's."""

    marks: mx.array | None = None

    def filled(self, like: mx.array, value: float) -> mx.array:
        return like if self.marks is None else mx.where(self.marks, value, like)


def _store(store: Store, prefix: str, rows: Rows, bits: int, group: int) -> mx.array:
    """Store scale, zero and codes of rows under their names behind ``prefix``; return the base."""
    scale, zero = min_max(rows, group, bits, False)
    scale = store.add(f"{prefix}scale", scale, scale_needs_fp32(scale))
    zero = store.add(f"{prefix}zero", zero, zero_needs_fp32(zero, scale))
    codes = rows.filled(encode(rows.x, scale, zero, bits, group), 0)
    store.add(f"{prefix}codes", pack(codes.astype(mx.uint8), bits), None)
    return decode(codes, scale, zero, group)


def store_anchored(store: Store, rows: Rows, tokens: int, bits: int, group: int) -> mx.array:
    """Store rows.x [batch, heads, n · tokens, head_dim]; return the base, shaped as it."""
    batch, heads, _, head_dim = rows.x.shape
    x = rows.x.reshape(batch, heads, -1, tokens, head_dim)
    marks = None
    if rows.places is not None:
        marks = rows.filled(mx.zeros(rows.x.shape, mx.bool_), True).reshape(x.shape)
    first, rest = (None, None) if marks is None else (marks[:, :, :, 0], marks[:, :, :, 1:])
    anchors = _Marked(x[:, :, :, 0], rows.side, marks=first)
    anchor = _store(store, "anchor_", anchors, ANCHOR_BITS, group)[:, :, :, None]
    left = (x[:, :, :, 1:] - anchor).flatten(2, 3)
    others = _Marked(left, rows.side, marks=None if rest is None else rest.flatten(2, 3))
    return _joined(anchor, _store(store, "", others, bits, group), tokens)


def read_anchored(
    arrays: Mapping[str, mx.array], head_dim: int, tokens: int, bits: int, group: int
) -> mx.array:
    """Return the base [..., n · tokens, head_dim] of what `store_anchored` stored."""

    def read(prefix: str, b: int) -> mx.array:
        codes = unpack(arrays[f"{prefix}codes"], b, head_dim)
        scale, zero = (off_grid(arrays, f"{prefix}{name}") for name in ("scale", "zero"))
        return decode(codes, scale, zero, group)

    return _joined(read("anchor_", ANCHOR_BITS)[..., None, :], read("", bits), tokens)


def _joined(anchor: mx.array, rest: mx.array, tokens: int) -> mx.array:
    """Return anchors [..., n, 1, head_dim] and what was stored beside them in their order."""
    rest = anchor + rest.reshape(*anchor.shape[:-2], tokens - 1, anchor.shape[-1])
    return mx.concatenate([anchor, rest], axis=-2).flatten(-3, -2)
