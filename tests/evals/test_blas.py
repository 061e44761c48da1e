"""evals.blas: candidates, their order, and what it says when there is none."""

import ctypes.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from evals import blas

ROOT = Path(__file__).resolve().parents[2]
on_linux_cpu = pytest.mark.skipif(
    sys.platform != "linux" or blas.backend() != "cpu", reason="only the Linux CPU needs a BLAS"
)


def in_new_process(code: str, **environment: str) -> dict[str, str]:
    """Run code that prints one JSON line, in a process where MLX is not imported yet."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **environment},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LOAD_AND_SAY = """
import json, os, sys
from evals.blas import load_optimised_blas
first = load_optimised_blas()
out = {"first": first, "second": load_optimised_blas(), "mlx": str("mlx.core" in sys.modules)}
import ctypes
out["global"] = str(hasattr(ctypes.CDLL(None), "cblas_sgemm"))
out["core"] = str(os.environ.get("OPENBLAS_CORETYPE"))
import mlx.core as mx
a = mx.arange(12, dtype=mx.float32).reshape(3, 4)
out["product"] = str((a @ a.T).tolist())
print(json.dumps(out))
"""


@on_linux_cpu
def test_it_loads_a_cblas_into_the_global_scope_once_and_before_mlx():
    out = in_new_process(LOAD_AND_SAY)
    if out["first"] == blas.REFERENCE:
        assert out["global"] == "False"
        pytest.skip("no optimised BLAS on this machine")
    assert out["global"] == "True"
    assert out["mlx"] == "False"
    assert out["second"] == out["first"]
    assert out["core"] == "None"
    assert out["product"] == str([[14.0, 38.0, 62.0], [38.0, 126.0, 214.0], [62.0, 214.0, 366.0]])


@on_linux_cpu
def test_gear_blas_names_the_library():
    library = ctypes.util.find_library("openblas")
    if library is None:
        pytest.skip("libopenblas is not installed")
    out = in_new_process(LOAD_AND_SAY, GEAR_BLAS=library)
    assert out["first"].startswith(f"GEAR_BLAS {library}")


@pytest.mark.parametrize("library", ["/no/such/library.so", "libm.so.6"])
@on_linux_cpu
def test_a_gear_blas_that_cannot_serve_is_an_error(library):
    code = """
import json
from evals.blas import BlasError, load_optimised_blas
try:
    load_optimised_blas()
except BlasError as error:
    print(json.dumps({"error": str(error)}))
"""
    message = in_new_process(code, GEAR_BLAS=library)["error"]
    assert f"GEAR_BLAS={library!r}" in message
    assert "cblas_sgemm" in message


@on_linux_cpu
def test_after_mlx_it_changes_nothing_and_says_so():
    code = """
import json
import mlx.core
from evals.blas import load_optimised_blas
print(json.dumps({"said": load_optimised_blas()}))
"""
    assert "MLX was imported before" in in_new_process(code)["said"]


@pytest.fixture
def plain_linux(monkeypatch):
    """A Linux CPU process without MLX, GEAR_BLAS or MKL, whose loads are recorded."""
    loads = []
    monkeypatch.setattr(blas.sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.delenv("GEAR_BLAS", raising=False)
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    monkeypatch.setattr(blas, "backend", lambda: "cpu")
    monkeypatch.setattr(blas, "_mkl", lambda: iter(()))
    monkeypatch.setattr(blas, "_chosen_kernel", lambda library: "Zen")
    monkeypatch.setattr(blas, "_load", loads.append)
    return loads


def call() -> str:
    """Call the function itself, past its memory."""
    return blas.load_optimised_blas.__wrapped__()


def test_mkl_of_this_environment_comes_before_the_systems_openblas(plain_linux, monkeypatch):
    monkeypatch.setattr(blas, "_mkl", lambda: iter(["/env/lib/libmkl_rt.so.3"]))
    assert call() == "MKL libmkl_rt.so.3"
    assert plain_linux == ["/env/lib/libmkl_rt.so.3"]


def test_a_broken_mkl_falls_back_to_openblas(plain_linux, monkeypatch):
    def load(library):
        if "mkl" in library:
            raise OSError("no libiomp5")
        plain_linux.append(library)

    monkeypatch.setattr(blas, "_mkl", lambda: iter(["/env/lib/libmkl_rt.so.3"]))
    monkeypatch.setattr(blas, "_load", load)
    assert call() == "OpenBLAS libopenblas.so.0"
    assert plain_linux == ["libopenblas.so.0"]


def test_without_any_library_it_says_what_to_install(plain_linux, monkeypatch):
    def load(library):
        raise OSError("not found")

    monkeypatch.setattr(blas, "_load", load)
    assert "libopenblas0-pthread" in call()
    assert "cpu-mkl" in call()


@pytest.mark.parametrize(("platform", "backend"), [("darwin", "metal"), ("linux", "cuda")])
def test_nothing_is_loaded_on_macos_or_cuda(plain_linux, monkeypatch, platform, backend):
    monkeypatch.setattr(blas.sys, "platform", platform)
    monkeypatch.setattr(blas, "backend", lambda: backend)
    monkeypatch.setenv("GEAR_BLAS", "/no/such/library.so")
    assert call() == "MLX's own"
    assert plain_linux == []


def test_an_openblas_that_does_not_know_the_cpu_gets_a_kernel(plain_linux, monkeypatch):
    seen = []
    monkeypatch.setattr(blas, "_chosen_kernel", lambda library: "Prescott")
    monkeypatch.setattr(blas, "_cpu_flags", lambda: {"sse3", "avx2", "fma"})
    monkeypatch.setattr(
        blas, "_load", lambda library: seen.append(blas.os.environ["OPENBLAS_CORETYPE"])
    )
    assert "kernel Haswell" in call()
    assert seen == ["Haswell"]
    assert "OPENBLAS_CORETYPE" not in blas.os.environ


def test_the_users_choice_of_kernel_stays(plain_linux, monkeypatch):
    monkeypatch.setattr(blas, "_chosen_kernel", lambda library: "Prescott")
    monkeypatch.setattr(blas, "_cpu_flags", lambda: {"avx2", "fma"})
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    assert call() == "OpenBLAS libopenblas.so.0"
    assert blas.os.environ["OPENBLAS_CORETYPE"] == "Nehalem"


AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"}


@pytest.mark.parametrize(
    ("core", "flags", "kernel"),
    [
        ("Prescott", AVX512, "SkylakeX"),
        ("Prescott", AVX512 - {"avx512vl"}, "Haswell"),
        ("Prescott", {"sse3"}, None),
        ("Zen", AVX512, None),
        ("", AVX512, None),
    ],
)
def test_better_kernel(core, flags, kernel):
    assert blas.better_kernel(core, flags) == kernel


@pytest.mark.parametrize(
    ("installed", "backend"),
    [
        ({"mlx", "mlx-metal"}, "metal"),
        ({"mlx", "mlx-cpu"}, "cpu"),
        ({"mlx", "mlx-cpu", "mlx-cuda-12"}, "cuda"),
        ({"mlx", "mlx-cuda-13"}, "cuda"),
    ],
)
def test_backend_comes_from_the_installed_distributions(monkeypatch, installed, backend):
    def distribution(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(blas.metadata, "distribution", distribution)
    assert blas.backend() == backend
