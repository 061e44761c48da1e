"""What is measured of one method on one sample, by the same code for both packages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import numpy as np

from comparison.data import Sample


@dataclass(frozen=True)
class Found:
    """Errors ‖X - X'‖_F / ‖X‖_F over all heads, and bits per element; None: it has no such side."""

    k_error: float | None
    v_error: float | None
    k_bits: float | None
    """Counted: ours by the closed form, buffered tokens included; theirs by what the object says.
    Its counters differ in what they leave out (see the notes)."""
    v_bits: float | None
    held_bits: float
    """Of the arrays that the object holds, each once, over the elements of the sides it has."""


def relative_error(exact: mx.array, rebuilt: mx.array) -> float:
    """Return ||X - X'||_F / ||X||_F over all entries, summed in fp64."""
    x = np.asarray(exact, dtype=np.float64)
    return float(np.linalg.norm(x - np.asarray(rebuilt, dtype=np.float64)) / np.linalg.norm(x))


def lost_share(exact: mx.array, kept: mx.array) -> float:
    """Return the error where ``kept`` has some of the tokens exactly and the others count as 0."""
    whole, part = (float(np.square(np.asarray(x, dtype=np.float64)).sum()) for x in (exact, kept))
    return max(1 - part / whole, 0.0) ** 0.5


def held_bytes(thing: Any) -> int:
    """Return nbytes of the MLX and NumPy arrays an object leads to; a buffer that some share, once.

    A view of another shape shares its buffer, and so do two names of one array.
    """
    seen: set[int] = set()
    sizes: dict[int, int] = {}
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, mx.array | np.ndarray):
            place = _place(one)
            sizes[place] = max(sizes.get(place, 0), one.nbytes)
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif not isinstance(one, type) and hasattr(one, "__dict__"):
            waiting += vars(one).values()
    return sum(sizes.values())


def _place(array: Any) -> int:
    """Return where an array's first entry lies."""
    view = np.array(array, copy=False)
    return view.__array_interface__["data"][0]


def bits(n_bytes: float, sample: Sample, sides: int = 1) -> float:
    """Return bits per element of one side, or of both."""
    return 8 * n_bytes / (sides * sample.exact[0].size)


def mean(found: Iterable[Found]) -> Found:
    """Return the mean of each number over samples of one kind."""
    rows = list(found)
    means: dict[str, Any] = {}
    for field in fields(Found):
        column = [getattr(row, field.name) for row in rows]
        means[field.name] = None if None in column else float(np.mean(column))
    return Found(**means)
