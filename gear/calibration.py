"""Tensors that a base takes from outside, such as codebooks: a safetensors file, by its content.

A base that wants them has an option ``calibration``, set to the file's path. What settings hold is
a reference, ``sha256:HEX#LAYER.SIDE``: keys and saved caches know the content and no place. In the
file a tensor is called LAYER.SIDE.NAME (``0.k.codebook``). It is read once a process and shared by
all caches, so it is no part of a block's bytes. Importing this loads no MLX.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gear.checks import SettingError

if TYPE_CHECKING:
    import mlx.core as mx

_FILES: dict[str, Path] = {}
"""Where a content that was referred to in this process lies."""


def reference(path: str, layer: int, side: str, name: str) -> str:
    """Return the reference of a file's tensors for one layer and side ("k" or "v").

    ``name`` is the setting's. Raises :class:`SettingError` where there is no such file.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise SettingError(name, path, "the path of a safetensors file")
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
