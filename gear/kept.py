"""Kept: the tokens of a prompt that an eviction left, a number of its own in every head.

K and V lie flat, [rows of all heads, head_dim], head after head and row after row of the batch, so
a head that keeps few tokens takes few bytes. Beside each stands its position in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

BEYOND = 2**31 - 1
"""The position of a pad: later than every query."""


@dataclass
class Kept:
    """What is left of ``tokens`` tokens; ``lengths[b][h]`` of them in head h of row b."""

    keys: mx.array
    values: mx.array
    positions: mx.array
    lengths: list[list[int]]
    tokens: int

    @classmethod
    def of(cls, keys: mx.array, values: mx.array, chosen: Sequence[Sequence[np.ndarray]]) -> Kept:
        """Keep of K and V [batch, heads, tokens, head_dim] the places ``chosen[b][h]``, ascending.

        Positions take 2 bytes each, 4 in a prompt of more than 65536 tokens.
        """
        batch, heads, tokens, _ = keys.shape
        lengths = [[len(places) for places in row] for row in chosen]
        places = np.concatenate([places for row in chosen for places in row])
        starts = np.repeat(np.arange(batch * heads) * tokens, np.array(lengths).ravel())
        index = mx.array((starts + places).astype(np.int32))
        positions = mx.array(places.astype(np.uint16 if tokens <= 2**16 else np.uint32))
        kept_keys, kept_values = (a.flatten(0, 2)[index] for a in (keys, values))
        mx.eval(kept_keys, kept_values)  # what was evicted is freed with the cache's own arrays
        return cls(kept_keys, kept_values, positions, lengths, tokens)

    @property
    def arrays(self) -> list[mx.array]:
        """K, V and positions."""
        return [self.keys, self.values, self.positions]

    @property
    def evicted(self) -> int:
        """Tokens that are gone, the mean over heads rounded down."""
        heads = sum(map(len, self.lengths))
        return (heads * self.tokens - self.positions.size) // heads

    @property
    def even(self) -> bool:
        """Whether every head keeps as many tokens."""
        return len({n for row in self.lengths for n in row}) == 1

    def padded(self) -> tuple[mx.array, mx.array, mx.array]:
        """Return K, V [batch, heads, longest, head_dim] and positions, those of pads `BEYOND`."""
        shape = len(self.lengths), len(self.lengths[0])
        if self.even:
            k, v, p = (a.reshape(*shape, -1, *a.shape[1:]) for a in self.arrays)
            return k, v, p.astype(mx.int32)
        lengths = np.array(self.lengths).reshape(-1, 1)
        places = np.arange(lengths.max())
        index = np.cumsum(lengths).reshape(-1, 1) - lengths + np.minimum(places, lengths - 1)
        at = mx.array(np.maximum(index, 0).astype(np.int32).reshape(*shape, -1))
        real = mx.array((places < lengths).reshape(*shape, -1))
        positions = mx.where(real, self.positions[at].astype(mx.int32), BEYOND)
        return self.keys[at], self.values[at], positions

    def dense(self) -> tuple[mx.array, mx.array]:
        """Return K and V [batch, heads, tokens, head_dim], zeros where a token is gone."""
        batch, heads = len(self.lengths), len(self.lengths[0])
        rows = np.repeat(np.arange(batch * heads), np.array(self.lengths).ravel())
        index = mx.array((rows * self.tokens + np.array(self.positions)).astype(np.int32))
        sides = []
        for kept in (self.keys, self.values):
            flat = mx.zeros((batch * heads * self.tokens, kept.shape[1]), kept.dtype)
            flat[index] = kept
            sides.append(flat.reshape(batch, heads, self.tokens, -1))
        return sides[0], sides[1]

    def trim(self, n: int) -> None:
        """Forget the last ``n`` tokens of the prompt, kept or not."""
        self.tokens -= n
        stays = np.array(self.positions) < self.tokens
        ends = np.cumsum(np.array(self.lengths).ravel())[:-1]
        counts = [int(part.sum()) for part in np.split(stays, ends)]
        heads = len(self.lengths[0])
        self.lengths = [counts[i : i + heads] for i in range(0, len(counts), heads)]
        index = mx.array(np.flatnonzero(stays).astype(np.int32))
        self.keys, self.values, self.positions = (a[index] for a in self.arrays)


def mask_of(mask: Any, positions: mx.array, shape: tuple[int, ...], offset: int) -> mx.array:
    """Return what a mask over all tokens says of the columns that are held, pads hidden.

    ``positions`` [batch, kv_heads, columns] are the columns' tokens, ``shape`` that of the newest
    queries [batch, heads, n, head_dim], ``offset`` the tokens up to them. ``mask`` is "causal",
    None or an array that broadcasts to [batch, heads, n, offset].
    """
    batch, heads, n, _ = shape
    positions = mx.repeat(positions, heads // positions.shape[1], axis=1)[:, :, None]
    if not isinstance(mask, mx.array):
        last = mx.arange(offset - n, offset)[:, None] if mask is not None else mx.array(BEYOND - 1)
        return mx.broadcast_to(positions <= last, (batch, heads, n, positions.shape[3]))
    whole = mx.broadcast_to(mask, (batch, heads, n, offset))
    columns = mx.broadcast_to(positions, (batch, heads, n, positions.shape[3]))
    picked = mx.take_along_axis(whole, mx.minimum(columns, offset - 1), axis=3)
    hidden = mx.array(False) if mask.dtype == mx.bool_ else mx.array(-mx.inf, mask.dtype)
    return mx.where(columns == BEYOND, hidden, picked)
