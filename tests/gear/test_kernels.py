"""The kernels' text for both backends, run on the host where a compiler is; their refusal."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from gear import kernels
from gear.lowrank import _inverse_factor, _lead

HOST = """
#include <cmath>
#include <cstdio>
using std::sqrt;
{header}
template <int M, int R, int STEPS>
void run(const float* x, const unsigned* size, const float* ridge, float* out) {{
    unsigned thread_index = 0;
    {body}
}}
int main() {{
    const int n = {m} * {m}, made = {m} * {r};
    float x[n], out[made], ridge = {ridge}f;
    unsigned size = 1;
    for (int i = 0; i < n; ++i) if (scanf("%f", x + i) != 1) return 1;
    run<{m}, {r}, {steps}>(x, &size, &ridge, out);
    for (int i = 0; i < made; ++i) printf("%.9g\\n", out[i]);
}}
"""


def _on_host(tmp_path: Path, name: str, x: np.ndarray, r: int) -> np.ndarray:
    """Compile a kernel's CUDA text as C++ and run it for one matrix."""
    header, body = kernels.sources(name, "cuda")
    source = HOST.format(
        header=header.replace("__device__", ""), body=body.split("\n", 1)[1], m=x.shape[0], r=r,
        steps=3, ridge=kernels.ridge_of(r),
    )  # fmt: skip
    (tmp_path / "kernel.cpp").write_text(source)
    compiler = shutil.which("g++") or shutil.which("clang++")
    command = [compiler, "-O1", "-o", str(tmp_path / "kernel"), str(tmp_path / "kernel.cpp")]
    subprocess.run(command, check=True)  # noqa: S603
    numbers = " ".join(repr(float(v)) for v in x.ravel())
    done = subprocess.run(  # noqa: S603
        [str(tmp_path / "kernel")], input=numbers, capture_output=True, text=True, check=True
    )
    return np.array(done.stdout.split(), dtype=np.float32).reshape(x.shape[0], r)


def _gram(decay: float) -> np.ndarray:
    y = np.random.default_rng(0).standard_normal((40, 8)) * decay ** np.arange(8)
    return (y.T @ y).astype(np.float32)


needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)


@needs_compiler
def test_the_factor_kernel_is_the_operations(tmp_path: Path) -> None:
    gram = _gram(0.8) / 40
    found = _on_host(tmp_path, "inverse_factor", gram, 8)
    expected = np.array(_inverse_factor(mx.array(gram)))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@needs_compiler
def test_the_lead_kernel_is_the_operations(tmp_path: Path) -> None:
    gram = _gram(0.7) / 40
    found = _on_host(tmp_path, "lead", gram, 3)
    expected = np.array(_lead(mx.array(gram), 3))
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-4)


@pytest.mark.parametrize("name", ["inverse_factor", "lead"])
def test_the_texts_differ_in_the_thread_and_the_address_space_only(name: str) -> None:
    (metal_head, metal), (cuda_head, cuda) = (kernels.sources(name, k) for k in ("metal", "cuda"))
    assert metal.split("\n", 1)[1] == cuda.split("\n", 1)[1]
    assert "thread_position_in_grid" in metal
    assert "cooperative_groups" in cuda
    assert metal_head.split("\n", 2)[2] == cuda_head.split("\n", 2)[2]
    assert "#define LOCAL thread\n" in metal_head
    assert "__device__" in cuda_head


def test_a_kernel_that_disagrees_is_switched_off_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kernels.backend() is None  # the tests run on a CPU
    assert not kernels.usable(8)
    monkeypatch.setattr(kernels, "inverse_factor", lambda gram: mx.zeros_like(gram))
    monkeypatch.setattr(kernels, "lead", lambda small, rank, _steps: small[..., :rank])
    with pytest.warns(RuntimeWarning, match="metal kernels are switched off"):
        assert not kernels._trusted.__wrapped__("metal")
