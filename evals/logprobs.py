"""The fp16 arm's log-probabilities on disk, so that every method of a sweep compares with the same.

One safetensors file a window under ``<root>/logprobs/<key of the fp16 record>/``: the
log-probabilities over the full vocabulary as fp16, and in full precision what fp16 would blur, the
targets' NLL and the top-1 token. It is a cache, never part of a record: bounded in bytes with the
oldest files out, and whoever misses a file computes it again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

MAX_BYTES = 4 << 30
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reference:
    """What the fp16 arm predicts on one window's scored tokens."""

    log_probs: mx.array
    """[tokens, vocabulary] fp16, natural logarithm."""
    nll: mx.array
    """[tokens] fp32, negative log-likelihood of the targets in nats."""
    top1: mx.array
    """[tokens] int32, the most likely token."""


class LogprobStore:
    """References of one fp16 record, by document and window.

    ``root`` is the results root, ``key`` the fp16 record's key, ``max_bytes`` bounds the files of
    *all* keys under the root.
    """

    def __init__(self, root: Path, key: str, max_bytes: int = MAX_BYTES) -> None:
        self.base = Path(root) / "logprobs"
        self.folder = self.base / key
        self.max_bytes = max_bytes

    def path(self, document: str, window: int) -> Path:
        """Return the file of one window; a document's id may hold anything, so it is hashed."""
        name = hashlib.sha256(document.encode()).hexdigest()[:24]
        return self.folder / f"{name}-{window}.safetensors"

    def get(self, document: str, window: int) -> Reference | None:
        """Return a window's reference, or ``None`` where it is absent or unreadable."""
        path = self.path(document, window)
        if not path.is_file():
            return None
        try:
            arrays = mx.load(str(path))
            mx.eval(arrays)
            return Reference(**arrays)  # pyright: ignore[reportCallIssue]
        except (RuntimeError, TypeError) as error:  # cut short, or not written by put()
            _log.warning("unreadable %s is computed again: %s", path.name, error)
            return None

    def put(self, document: str, window: int, reference: Reference) -> None:
        """Store a window's reference atomically, then drop the oldest files over the bound.

        A full or read-only disk is logged, not raised: what cannot be kept is computed again.
        """
        path = self.path(document, window)
        temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp.safetensors")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            mx.save_safetensors(str(temporary), dict(vars(reference)))
            temporary.replace(path)
            self._shrink()
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                temporary.unlink()
            _log.warning("fp16 log-probabilities of %s not kept: %s", document, error)

    def _shrink(self) -> None:
        """Unlink the oldest files until the bound holds; another process may do the same."""
        files = []
        for path in self.base.glob("*/*.safetensors"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            files.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
