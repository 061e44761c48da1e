"""Where arrays live, when a lazy graph is cut, and what runs beside: all that differs by device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from typing import Any

import mlx.core as mx


def on_cpu() -> bool:
    """Say whether MLX's default device is the CPU."""
    return mx.default_device().type == mx.DeviceType.cpu


def release(*arrays: mx.array) -> None:
    """Evaluate now on a CPU, so that what led to ``arrays`` is freed before the next step.

    A sync costs nothing there; on a GPU the graph stays whole and is compiled.
    """
    if on_cpu():
        mx.eval(*arrays)


def beside() -> AbstractContextManager[Any]:
    """Put the operations of the block on a second CPU stream, which another core computes.

    A GPU fills itself with one stream.
    """
    return mx.stream(_second_stream()) if on_cpu() else nullcontext()


@lru_cache(maxsize=1)
def _second_stream() -> Any:
    """Return the stream; in each thread it is another one, as MLX demands."""
    return mx.new_thread_local_stream(mx.cpu)  # pyright: ignore[reportArgumentType]


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` where launches cost more than arithmetic: on an accelerator.

    It takes arrays, dicts of them and None, and returns arrays.
    """
    compiled = mx.compile(function)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*arguments) if on_cpu() else compiled(*arguments)

    return call
