"""An optimised CBLAS for MLX on the Linux CPU, and which backend the installed MLX has.

MLX's CPU wheel for Linux carries the reference BLAS (about 2 GFLOP/s in float32). A library with
the same ``cblas_*`` symbols, loaded into the global symbol scope before ``mlx.core``, takes its
place: 40 to 100 times faster. macOS and CUDA need none of this.

Not among the candidates: cmeel-openblas (illegal instructions) and scipy-openblas32 (its symbols
carry a prefix).
"""

from __future__ import annotations

import ctypes
import os
import subprocess  # OpenBLAS is asked for its kernel in a process of its own
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

OPENBLAS = "libopenblas.so.0"
REFERENCE = (
    "reference BLAS: about 40x slower; install Debian's libopenblas0-pthread, or the extra cpu-mkl"
    " (pip install mkl), or set GEAR_BLAS to a library with cblas_sgemm"
)
# OpenBLAS kernels for a CPU it does not know, best first, with the CPU flags each one needs.
KERNELS = {
    "SkylakeX": {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"},
    "Haswell": {"avx2", "fma"},
}
GENERIC_KERNELS = {"Prescott", "Core2", "Generic", "Unknown"}
_CORE_NAME = (
    "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).openblas_get_corename;"
    " f.restype = ctypes.c_char_p; print(f().decode())"
)


class BlasError(ValueError):
    """``GEAR_BLAS`` names a library that cannot be used."""


def _installed(distribution: str) -> bool:
    """Return whether a distribution is installed, without importing it."""
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def backend() -> str:
    """Return what the installed MLX computes on: ``metal``, ``cuda`` or ``cpu``. No MLX import."""
    if _installed("mlx-metal"):
        return "metal"
    return "cuda" if _installed("mlx-cuda-12") or _installed("mlx-cuda-13") else "cpu"


def _mkl() -> Iterator[str]:
    """Yield the MKL library of the registry package ``mkl``; it finds its own parts beside it."""
    if _installed("mkl"):
        for file in metadata.distribution("mkl").files or ():
            if file.name.startswith("libmkl_rt.so"):
                yield str(Path(str(file.locate())).resolve())


def _cpu_flags() -> set[str]:
    """Return the instruction sets that the kernel offers (x86 names), empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def better_kernel(core: str, flags: set[str]) -> str | None:
    """Return the OpenBLAS kernel to ask for where it chose a generic one, None where it chose well.

    An OpenBLAS older than the CPU falls back to SSE3 ("Prescott") even where AVX-512 is there,
    which costs a factor of six.
    """
    if core not in GENERIC_KERNELS:
        return None
    return next((kernel for kernel, needed in KERNELS.items() if needed <= flags), None)


def _chosen_kernel(library: str) -> str:
    """Return the kernel that OpenBLAS chooses by itself, "" where it does not tell."""
    # Asked in a process of its own: the choice is made once, while the library loads.
    command = [sys.executable, "-I", "-c", _CORE_NAME, library]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _load(library: str) -> None:
    """Load a library into the global scope; OSError or AttributeError where it is no CBLAS."""
    ctypes.CDLL(library).cblas_sgemm  # noqa: B018 (before it can shadow anything)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def _load_tuned(library: str) -> str:
    """Load a library, an OpenBLAS with a kernel that suits the CPU; returns a note for the log."""
    kernel = None
    if "OPENBLAS_CORETYPE" not in os.environ:
        kernel = better_kernel(_chosen_kernel(library), _cpu_flags())
    if kernel is None:
        _load(library)
        return ""
    os.environ["OPENBLAS_CORETYPE"] = kernel
    try:
        _load(library)
    finally:
        # Only for this library: numpy brings its own OpenBLAS, which knows the CPU better.
        del os.environ["OPENBLAS_CORETYPE"]
    return f" (kernel {kernel}: this OpenBLAS does not know the CPU)"


@cache
def load_optimised_blas() -> str:
    """Load an optimised CBLAS into this process and return a description for the log.

    Call it before MLX is imported. Candidates in order: the library that ``GEAR_BLAS`` names,
    MKL where the package ``mkl`` is installed, the system's OpenBLAS. Without one MLX keeps its
    reference BLAS and the description says what to install. Raises :class:`BlasError` when
    ``GEAR_BLAS`` cannot be loaded or exports no ``cblas_sgemm``.
    """
    if sys.platform != "linux" or backend() != "cpu":
        return "MLX's own"
    if "mlx.core" in sys.modules:
        return "unknown: MLX was imported before an optimised BLAS could be loaded"
    if given := os.environ.get("GEAR_BLAS"):
        try:
            return f"GEAR_BLAS {given}{_load_tuned(given)}"
        except (OSError, AttributeError) as error:
            raise BlasError(
                f"GEAR_BLAS={given!r}: must be a shared library that exports cblas_sgemm ({error})."
                f" Next: unset it, or give a path such as {OPENBLAS}."
            ) from error
    for library in _mkl():
        try:
            _load(library)
        except (OSError, AttributeError):
            continue
        return f"MKL {Path(library).name}"
    try:
        return f"OpenBLAS {OPENBLAS}{_load_tuned(OPENBLAS)}"
    except (OSError, AttributeError):
        return REFERENCE
