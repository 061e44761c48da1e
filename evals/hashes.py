"""SHA-256 of files, remembered by path, size and modification time.

Hashing half a gigabyte of weights takes seconds, and every job of a sweep asks for it. The memory
is a small JSON file that may be deleted at any time; a file that was touched is hashed anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the file's content as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined_sha256(hashes: dict[str, str]) -> str:
    """Return one SHA-256 over names and content hashes, whatever order they come in."""
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _read(memory: Path) -> dict[str, Any]:
    """Return the remembered entries; an absent or unreadable memory is an empty one."""
    try:
        entries = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _write(memory: Path, entries: dict[str, Any]) -> None:
    """Replace the memory in one step, so a reader never sees half of it."""
    handle, name = tempfile.mkstemp(dir=memory.parent, prefix=memory.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entries, file, indent=1, sort_keys=True)
        os.replace(name, memory)
    except BaseException:
        os.unlink(name)
        raise


def cached_sha256(paths: Iterable[Path], root: Path) -> dict[str, str]:
    """Return {file name: SHA-256}, hashing only files that ``<root>/cache/hashes.json`` lacks.

    A results root that cannot be written costs time, not correctness: nothing is remembered then.
    """
    from filelock import FileLock

    memory = root / "cache" / "hashes.json"
    known = _read(memory)
    hashes, fresh = {}, {}
    for path in paths:
        stat = path.stat()
        stamp = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        entry = known.get(str(path.resolve()))
        if not isinstance(entry, dict) or {k: entry.get(k) for k in stamp} != stamp:
            entry = fresh[str(path.resolve())] = {**stamp, "sha256": file_sha256(path)}
        hashes[path.name] = entry["sha256"]
    if fresh:
        with contextlib.suppress(OSError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(memory.with_suffix(".lock")):
                _write(memory, {**_read(memory), **fresh})
    return hashes
