"""Tensors that a base takes from outside, such as codebooks: a safetensors file, by its content.

A base that wants them has an option ``calibration``, set to the file's path. What settings hold is
a reference, ``sha256:HEX#LAYER.SIDE``: keys and saved caches know the content and no place. In the
file a tensor is called LAYER.SIDE.NAME (``0.k.codebook``). It is read once a process and shared by
all caches, so it is no part of a block's bytes. What can fit them is `Fitted`. Importing this loads
no MLX.

The path may be ``auto``: whoever runs the method (evals/calibrated.py) puts a file's in its place
before a cache is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, runtime_checkable

from gear.checks import SettingError

if TYPE_CHECKING:
    import mlx.core as mx

    from gear.config import SideSettings

AUTO = "auto"
"""In place of a path: the file that was made for this method and model."""

_FILES: dict[str, Path] = {}
"""Where a content that was referred to in this process lies."""


@dataclass(frozen=True)
class Seen:
    """What one layer's cache meets in some windows of text, fp32; queries times the scale."""

    keys: mx.array | None = None
    """After RoPE, as the values [windows, kv_heads, tokens, head_dim]."""
    values: mx.array | None = None
    queries: mx.array | None = None
    """After RoPE, [windows, kv_heads, heads a KV head, n, head_dim]."""


@runtime_checkable
class FittedBase(Protocol):
    """A base (gear/bases.py) with tensors that are fitted on K or V.

    They depend on the settings and options in its ``fit_uses``; without that, on ``bits`` and all
    its options.
    """

    defaults: ClassVar[Mapping[str, Any]]

    def fit(self, side: str, x: mx.array, s: SideSettings, seed: int) -> dict[str, mx.array]:
        """Return the tensors of one layer and side for x [windows, heads, tokens, head_dim]."""
        ...


@runtime_checkable
class Fitted(Protocol):
    """A method some of whose tensors are fitted on a text (evals/calibrate.py)."""

    fits_queries: ClassVar[bool]
    """It is fitted on queries, else on K and V."""

    def fits(self, n_layers: int) -> dict[str, Any]:
        """Return what tensors depend on that are to come from the file ``auto``.

        Plain values by side, "k" or "v"; a side without such tensors is left out.
        """
        ...

    def fit(self, layer: int, n_layers: int, seen: Seen, seed: int) -> dict[str, mx.array]:
        """Return the tensors of one layer, called SIDE.NAME."""
        ...


def is_auto(path: object) -> bool:
    """Tell whether a path, or the reference made of it, is ``auto``."""
    return str(path).partition("#")[0] == AUTO


def reference(path: str, layer: int, side: str, name: str) -> str:
    """Return the reference of a file's tensors for one layer and side ("k" or "v").

    ``name`` is the setting's. Raises :class:`SettingError` where there is no such file.
    """
    if path == AUTO:
        return f"{AUTO}#{layer}.{side}"
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise SettingError(name, path, f"the path of a safetensors file, or {AUTO}")
    stat = file.stat()
    content = _content(file, stat.st_mtime_ns, stat.st_size)
    _FILES[content] = file
    return f"{content}#{layer}.{side}"


@lru_cache(maxsize=64)
def _content(file: Path, _mtime: int, _size: int) -> str:
    """Return the hash of a file, anew when it changes."""
    with file.open("rb") as stream:
        return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"


@lru_cache(maxsize=512)
def tensors(reference: str) -> dict[str, mx.array]:
    """Return the tensors of a reference by NAME.

    Errors: ``ValueError`` for a content that no setting of this process names, or without tensors
    of this layer and side.
    """
    import mlx.core as mx

    content, _, part = reference.partition("#")
    if content == AUTO:
        raise ValueError(
            f"calibration={AUTO!r}: names no file by itself; run.py finds one. Give the path that "
            "scripts/calibrate.py prints."
        )
    if content not in _FILES:
        raise ValueError(
            f"calibration {content}: not known in this process. Resolve settings that name its "
            "file before a cache that was made with it is loaded."
        )
    held = cast("dict[str, mx.array]", mx.load(str(_FILES[content]), format="safetensors"))
    found = {n.removeprefix(f"{part}."): a for n, a in held.items() if n.startswith(f"{part}.")}
    if not found:
        raise ValueError(f"{_FILES[content]}: holds no tensors {part}.*; it has {sorted(held)}.")
    return found
