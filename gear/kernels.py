"""Kernels written once, for Metal and CUDA: only the line that finds the thread differs.

A kernel is an alternative to MLX operations that stay the reference: on first use on a device it
is held against them on a small input, and switched off with a warning where it disagrees.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

_LARGEST_RANK = 16  # a thread holds two rank x rank matrices

_THREAD = {
    "metal": "uint thread = thread_position_in_grid.x;",
    "cuda": "auto thread = cooperative_groups::this_grid().thread_rank();",
}

# One thread a matrix, unrolled into registers: the elimination of lowrank._inverse_factor.
_INVERSE_FACTOR = """
    if (thread >= size[0]) return;
    float a[R * R], b[R * R];
#pragma unroll
    for (int i = 0; i < R; ++i) {
#pragma unroll
        for (int j = 0; j < R; ++j) {
            float g = gram[thread * R * R + i * R + j];
            a[i * R + j] = i == j ? g + ridge[0] : g;
            b[i * R + j] = i == j ? 1.0f : 0.0f;
        }
    }
#pragma unroll
    for (int j = 0; j < R; ++j) {
        float p = a[j * R + j] > ridge[0] ? a[j * R + j] : ridge[0];
#pragma unroll
        for (int i = j + 1; i < R; ++i) {
            float f = a[i * R + j] / p;
#pragma unroll
            for (int c = 0; c < R; ++c) {
                a[i * R + c] -= f * a[j * R + c];
                b[i * R + c] -= f * b[j * R + c];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < R; ++i) {
        float p = a[i * R + i] > ridge[0] ? a[i * R + i] : ridge[0];
        float s = 1.0f / sqrt(p);
#pragma unroll
        for (int c = 0; c < R; ++c) {
            out[thread * R * R + c * R + i] = b[i * R + c] * s;
        }
    }
"""


def ridge_of(rank: int) -> float:
    """Return the ridge for a unit diagonal: above what fp32 elimination over ``rank`` loses."""
    return 2.5e-7 * rank


def backend() -> str | None:
    """Return "metal" or "cuda" where the default device is such a GPU, else None."""
    if mx.default_device() == mx.Device(mx.cpu, 0):
        return None
    return "metal" if mx.metal.is_available() else "cuda"


def source(body: str, kind: str) -> str:
    """Return the kernel text of ``body`` for "metal" or "cuda"."""
    return f"    {_THREAD[kind]}\n{body}"


@lru_cache(maxsize=8)
def _build(kind: str) -> Any:
    """Return the compiled-on-use kernel of one backend."""
    make = mx.fast.metal_kernel if kind == "metal" else mx.fast.cuda_kernel
    return make(
        name="gear_inverse_factor",
        input_names=["gram", "size", "ridge"],
        output_names=["out"],
        source=source(_INVERSE_FACTOR, kind),
    )


def _run(kind: str, gram: mx.array) -> mx.array:
    """Run the kernel on gram [..., r, r]."""
    rank, size = gram.shape[-1], gram.size // gram.shape[-1] ** 2
    scalars = (mx.array([size], mx.uint32), mx.array([ridge_of(rank)]))
    (out,) = _build(kind)(
        inputs=[gram, *scalars],
        template=[("R", rank)],
        grid=(size, 1, 1),
        threadgroup=(min(size, 32), 1, 1),
        output_shapes=[gram.shape],
        output_dtypes=[mx.float32],
    )
    return out


@lru_cache(maxsize=8)
def _trusted(kind: str) -> bool:
    """Say whether the kernel orthonormalises on this device; warn where it does not."""
    y = np.random.default_rng(0).standard_normal((3, 40, 8)).astype(np.float32)
    y /= np.linalg.norm(y, axis=-2, keepdims=True)
    try:
        c = np.array(_run(kind, mx.array(y.swapaxes(-1, -2) @ y)))
    except (RuntimeError, ValueError) as error:
        problem = str(error).splitlines()[0]
    else:
        q = y @ c
        if np.abs(q.swapaxes(-1, -2) @ q - np.eye(8)).max() < 1e-3:
            return True
        problem = "it disagrees with the MLX operations"
    warnings.warn(f"GEAR's {kind} kernel is switched off: {problem}.", RuntimeWarning, stacklevel=2)
    return False


def inverse_factor_kernel(rank: int) -> Callable[[mx.array], mx.array] | None:
    """Return the kernel for [..., rank, rank], or None where MLX operations must do it."""
    kind = backend()
    if kind is None or rank > _LARGEST_RANK or not _trusted(kind):
        return None
    return lambda gram: _run(kind, gram)
