"""K and V kept as they came: the streaming buffer and the attention sinks."""

from __future__ import annotations

import mlx.core as mx


class ExactTokens:
    """A run of exact tokens; K and V are [batch, kv_heads, tokens, head_dim], in order."""

    def __init__(self) -> None:
        self.arrays: list[mx.array] = []  # [K, V], or nothing

    def __len__(self) -> int:
        return self.arrays[0].shape[2] if self.arrays else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held."""
        return sum(a.nbytes for a in self.arrays)

    @property
    def elements(self) -> int:
        """Entries of K and V together."""
        return sum(a.size for a in self.arrays)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add tokens behind those held."""
        if keys.shape[2] == 0:
            return
        new = [keys, values]
        if self.arrays:
            new = [mx.concatenate([a, b], axis=2) for a, b in zip(self.arrays, new, strict=True)]
        self.arrays = new

    def take(self, n: int) -> tuple[mx.array, mx.array]:
        """Remove and return the oldest ``n`` tokens."""
        keys, values = (a[:, :, :n] for a in self.arrays)
        # a copy: a slice would keep the whole array alive
        rest = [mx.contiguous(a[:, :, n:]) for a in self.arrays]
        mx.eval(rest)
        self.arrays = rest if rest[0].shape[2] else []
        return keys, values

    def trim(self, n: int) -> int:
        """Forget the newest ``n`` tokens (at most all); return how many were."""
        n = min(n, len(self))
        left = len(self) - n
        self.arrays = [a[:, :, :left] for a in self.arrays] if left else []
        return n
