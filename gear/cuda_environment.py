"""What MLX's CUDA build is told before its first use, by environment variables. No MLX here.

A user's own value stays. Other builds read none of them.
"""

from __future__ import annotations

import os

SETTINGS = {
    # fp32 means fp32: scores are compared with those of other devices.
    "MLX_ENABLE_TF32": "0",
    # MLX captures each run of launches as a CUDA graph and keeps the last 400. Rows of a batch that
    # fill their buffers at different steps pass through more kinds than that, and each graph is
    # then made anew every time it comes round (BENCHMARKS.md, batch).
    "MLX_CUDA_GRAPH_CACHE_SIZE": "4096",
    # MLX ends a process that has made twice that many, however long it has lived.
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}


def set_up() -> None:
    """Set what is not set yet; call it before MLX computes anything."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
