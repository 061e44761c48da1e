"""Where arrays live, and when a lazy graph is cut: the two things that differ by device."""

from __future__ import annotations

import mlx.core as mx


def on_cpu() -> bool:
    """Say whether MLX's default device is the CPU."""
    return mx.default_device() == mx.Device(mx.cpu, 0)


def release(*arrays: mx.array) -> None:
    """Evaluate now on a CPU, so that what led to ``arrays`` is freed before the next step.

    A sync costs nothing there; on a GPU the graph stays whole and is compiled.
    """
    if on_cpu():
        mx.eval(*arrays)
