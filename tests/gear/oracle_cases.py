"""Blocks to compress: settings by name, values of many kinds, and hypothesis strategies of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from gear.block import Block
from gear.codec import compress
from gear.config import GearConfig, LayerSettings, SideSettings, resolve

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
KINDS = ("normal", "heavy", "drift", "integers", "constant", "low_rank", "shifted", "zeros")


def make_settings(**values: Any) -> LayerSettings:
    """Return the settings of one layer; n_b and the size limit are set so that any block passes."""
    values.setdefault("group_size", 16)
    values.setdefault("n_b", values["group_size"])
    return resolve(GearConfig(allow_larger_than_fp16=True, **values), 1)[0]


def make_values(kind: str, shape: tuple[int, int, int, int], seed: int) -> NDArray[np.float32]:
    """Return x [batch, heads, tokens, head_dim] of one kind, magnitudes around 1."""
    rng = np.random.default_rng(seed)
    batch, heads, tokens, head_dim = shape
    x = rng.normal(size=shape)
    if kind == "heavy":
        x = x * np.where(rng.random(shape) < 0.02, 30.0, 1.0)
    elif kind == "drift":
        x += 5 * rng.normal(size=(batch, heads, 1, head_dim))
        x += 3 * np.linspace(-1, 1, tokens)[:, None] * rng.normal(size=(head_dim,))
    elif kind == "integers":
        x = rng.integers(-4, 5, size=shape)
    elif kind == "constant":
        x = np.where(rng.random((batch, heads, 1, head_dim)) < 0.5, rng.normal(), x)
    elif kind == "low_rank":
        left, right = (rng.normal(size=(*shape[:2], n, 2)) for n in (tokens, head_dim))
        x = x * 0.05 + left @ right.swapaxes(-1, -2)
    elif kind == "shifted":
        x = 1000 + 0.1 * x
    elif kind == "zeros":
        x = np.zeros(shape)
    return np.asarray(x, dtype=np.float32)


@dataclass(frozen=True)
class Case:
    """One block to compress."""

    side: str
    shared: LayerSettings
    rank: int | None
    kind: str
    dtype: str
    shape: tuple[int, int, int, int]
    seed: int
    scale: float = 1.0

    @property
    def settings(self) -> SideSettings:
        return self.shared.k if self.side == "k" else self.shared.v

    def array(self) -> mx.array:
        """Return the block's values in its dtype."""
        values = make_values(self.kind, self.shape, self.seed) * np.float32(self.scale)
        return mx.array(values).astype(DTYPES[self.dtype])

    def compress(self, rows: slice = slice(None)) -> Block:
        """Compress the block, or some of its batch rows, by the code under test."""
        return compress(self.array()[rows], self.side, self.settings, self.shared, self.rank)


def to_numpy(x: mx.array) -> NDArray[np.float64]:
    """Return x in float64; every fp16, bf16 and fp32 value is one."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


@st.composite
def cases(draw: st.DrawFn, base: str, stage: str, side: str, solver: str) -> Case:
    """Draw a block for one base, outlier order, side and solver; every other setting is drawn."""
    affine = base == "affine_mlx"
    group = draw(st.sampled_from([32, 64] if affine else [1, 7, 16, 32, 64]))
    tokens = draw(st.one_of(st.integers(1, 70), st.integers(1, 300)))
    head_dim = draw(st.sampled_from([1, 3, 8, 20, 32, 64, 80]))
    if affine and side == "k":
        tokens = group * draw(st.integers(1, 192 // group))
    elif affine:
        head_dim = 64
    shared = make_settings(
        base=base, outlier_stage=stage, solver=solver, group_size=group,
        bits=draw(st.sampled_from([2, 3, 4, 5, 6, 8] if affine else list(range(1, 9)))),
        sparse_frac=draw(st.sampled_from([0.0, 0.02, 0.02, 0.1, 0.5, 1.0])),
        factor_bits=draw(st.sampled_from([16, 16, 8, 4])),
        outlier_bits=draw(st.sampled_from([16, 8])),
        scale_bits=16 if affine else draw(st.sampled_from([16, 16, 8])),
    )  # fmt: skip
    return Case(
        side, shared,
        rank=draw(st.sampled_from([0, 1, 2, 4, 200])),
        kind=draw(st.sampled_from(KINDS)),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        shape=(draw(st.integers(1, 2)), draw(st.integers(1, 3)), tokens, head_dim),
        seed=draw(st.integers(0, 2**16)),
        scale=draw(st.sampled_from([1.0, 1.0, 1e-3, 30.0])),
    )  # fmt: skip
