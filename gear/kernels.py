"""Kernels written once, for Metal and CUDA: only the line that finds the thread differs.

A kernel is an alternative to MLX operations that stay the reference: on first use on a device it
is held against them on a small input, and switched off with a warning where it disagrees. These
replace the many tiny steps of the low-rank solver (lowrank.py), whose launches would dominate.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from gear.placement import on_cpu

LARGEST_WIDTH = 20  # a thread holds a few width x width matrices in its own memory

_PREFIX = {
    "metal": "#define LOCAL thread\n#define FUNCTION inline\n",
    "cuda": "#define LOCAL\n#define FUNCTION __device__ inline\n",
}
_THREAD = {
    "metal": "uint thread_index = thread_position_in_grid.x;",
    "cuda": "auto thread_index = cooperative_groups::this_grid().thread_rank();",
}

# One thread a matrix: lowrank._inverse_factor, and lowrank._orthonormal on a few rows.
_FUNCTIONS = """
template <int R>
FUNCTION void inverse_factor(LOCAL float* a, LOCAL float* c, float ridge) {
    float unit[R];
    for (int i = 0; i < R; ++i) {
        float d = a[i * R + i];
        unit[i] = 1.0f / sqrt(d > 1e-30f ? d : 1e-30f);
    }
    for (int i = 0; i < R; ++i) {
        for (int j = 0; j < R; ++j) {
            a[i * R + j] = a[i * R + j] * unit[i] * unit[j] + (i == j ? ridge : 0.0f);
            c[i * R + j] = i == j ? 1.0f : 0.0f;  // rows of L^-1 until the end
        }
    }
    for (int j = 0; j < R; ++j) {
        float p = a[j * R + j] > ridge ? a[j * R + j] : ridge;
        for (int i = j + 1; i < R; ++i) {
            float f = a[i * R + j] / p;
            for (int k = 0; k < R; ++k) {
                a[i * R + k] -= f * a[j * R + k];
                c[i * R + k] -= f * c[j * R + k];
            }
        }
    }
    for (int i = 0; i < R; ++i) {
        float p = a[i * R + i] > ridge ? a[i * R + i] : ridge;
        for (int k = 0; k < R; ++k) {
            c[i * R + k] *= unit[k] / sqrt(p);
        }
    }
}

template <int M, int R>
FUNCTION void orthonormal(LOCAL float* y, float ridge, int passes) {
    float a[R * R], c[R * R], row[R];
    for (int pass = 0; pass < passes; ++pass) {
        for (int i = 0; i < R; ++i) {
            for (int j = 0; j < R; ++j) {
                float sum = 0.0f;
                for (int m = 0; m < M; ++m) sum += y[m * R + i] * y[m * R + j];
                a[i * R + j] = sum;
            }
        }
        inverse_factor<R>(a, c, ridge);
        for (int m = 0; m < M; ++m) {
            for (int i = 0; i < R; ++i) {
                row[i] = 0.0f;
                for (int k = 0; k < R; ++k) row[i] += y[m * R + k] * c[i * R + k];
            }
            for (int i = 0; i < R; ++i) y[m * R + i] = row[i];
        }
    }
}
"""

_FACTOR_BODY = """
    if (thread_index >= size[0]) return;
    float a[R * R], c[R * R];
    for (int i = 0; i < R * R; ++i) a[i] = x[thread_index * R * R + i];
    inverse_factor<R>(a, c, ridge[0]);
    for (int i = 0; i < R; ++i) {
        for (int k = 0; k < R; ++k) out[thread_index * R * R + k * R + i] = c[i * R + k];
    }
"""

_LEAD_BODY = """
    if (thread_index >= size[0]) return;
    float s[M * M], y[M * R], t[M * R];
    for (int i = 0; i < M * M; ++i) s[i] = x[thread_index * M * M + i];
    for (int m = 0; m < M; ++m) {
        for (int r = 0; r < R; ++r) y[m * R + r] = s[m * M + r];
    }
    for (int step = 0; step < STEPS; ++step) {
        orthonormal<M, R>(y, ridge[0], 1);
        for (int m = 0; m < M; ++m) {
            for (int r = 0; r < R; ++r) {
                t[m * R + r] = 0.0f;
                for (int k = 0; k < M; ++k) t[m * R + r] += s[m * M + k] * y[k * R + r];
            }
        }
        for (int i = 0; i < M * R; ++i) y[i] = t[i];
    }
    orthonormal<M, R>(y, ridge[0], 2);
    for (int i = 0; i < M * R; ++i) out[thread_index * M * R + i] = y[i];
"""

_BODIES = {
    "inverse_factor": (_FACTOR_BODY, ["x", "size", "ridge"]),
    "lead": (_LEAD_BODY, ["x", "size", "ridge"]),
}


def ridge_of(rank: int) -> float:
    """Return the ridge for a unit diagonal: above what fp32 elimination over ``rank`` loses."""
    return 2.5e-7 * rank


def backend() -> str | None:
    """Return "metal" or "cuda" where the default device is such a GPU, else None."""
    if on_cpu():
        return None
    return "metal" if mx.metal.is_available() else "cuda"


def sources(name: str, kind: str) -> tuple[str, str]:
    """Return the header and the body of a kernel for "metal" or "cuda"."""
    return _PREFIX[kind] + _FUNCTIONS, f"    {_THREAD[kind]}\n{_BODIES[name][0]}"


@lru_cache(maxsize=8)
def _build(name: str, kind: str) -> Any:
    """Return the compiled-on-use kernel of one backend."""
    make = mx.fast.metal_kernel if kind == "metal" else mx.fast.cuda_kernel
    header, source = sources(name, kind)
    inputs = _BODIES[name][1]
    return make(
        name=f"gear_{name}", input_names=inputs, output_names=["out"], source=source, header=header
    )


def _run(name: str, x: mx.array, shape: tuple[int, ...], **template: int) -> mx.array:
    """Run one thread for each matrix of x [..., n, n]; the result has ``shape``."""
    size = x.size // x.shape[-1] ** 2
    rank = template["R"]
    (out,) = _build(name, str(backend()))(
        inputs=[x, mx.array([size], mx.uint32), mx.array([ridge_of(rank)])],
        template=list(template.items()),
        grid=(size, 1, 1),
        threadgroup=(min(size, 32), 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.float32],
    )
    return out


def inverse_factor(gram: mx.array) -> mx.array:
    """Run lowrank._inverse_factor's kernel on gram [..., r, r] (`usable` first)."""
    return _run("inverse_factor", gram, gram.shape, R=gram.shape[-1])


def lead(small: mx.array, rank: int, steps: int) -> mx.array:
    """Run lowrank._lead's kernel on small [..., m, m]; returns [..., m, rank] (`usable` first)."""
    shape = (*small.shape[:-1], rank)
    sizes = {"M": small.shape[-1], "R": rank, "STEPS": steps}
    return _run("lead", small, shape, **sizes)


@lru_cache(maxsize=8)
def _trusted(kind: str) -> bool:
    """Say whether the kernels are right on this device; warn where they are not."""
    y = np.random.default_rng(0).standard_normal((3, 40, 8)).astype(np.float32)
    y /= np.linalg.norm(y, axis=-2, keepdims=True)
    gram = y.swapaxes(-1, -2) @ y
    try:
        factor = np.array(inverse_factor(mx.array(gram)))
        found = np.array(lead(mx.array(gram), 3, 50))
    except (RuntimeError, ValueError) as error:
        problem = str(error).splitlines()[0]
    else:
        q = y @ factor
        errors = [np.abs(q.swapaxes(-1, -2) @ q - np.eye(8)).max()]
        best = np.linalg.eigh(gram)[1][..., -3:]
        errors.append(np.abs(found @ found.swapaxes(-1, -2) - best @ best.swapaxes(-1, -2)).max())
        if max(errors) < 1e-2:
            return True
        problem = "they disagree with the MLX operations"
    warnings.warn(
        f"GEAR's {kind} kernels are switched off: {problem}.", RuntimeWarning, stacklevel=2
    )
    return False


def usable(width: int) -> bool:
    """Say whether kernels may stand in for MLX operations on matrices of ``width`` columns."""
    kind = backend()
    return kind is not None and width <= LARGEST_WIDTH and _trusted(kind)
