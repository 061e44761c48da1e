"""Records: what one job measured, on disk, and the only source of every table.

``<root>/records/<key>/`` holds ``record.json`` (its rename is the commit point: it is there whole
or not at all), ``samples.jsonl`` and ``log.txt``. The key is the sha256 of the job's effective
config, so the same job is the same folder, wherever the root is moved. No MLX, no MLflow here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

PROTOCOL_VERSION = 3
"""Raised whenever the same config may give another result; part of every key."""

FINISHED, FAILED = "FINISHED", "FAILED"
RECORD, SAMPLES, LOG = "record.json", "samples.jsonl", "log.txt"

_FIELDS = (
    "key", "status", "config", "metrics", "guards", "environment", "started", "finished",
    "mlflow_run_id",
)  # fmt: skip
_NOT_COMPARED = ("environment", "started", "finished", "mlflow_run_id", "words")
_NOT_COMPARED_METRICS = ("speed/", "mem/")


def results_root() -> Path:
    """Return the results root: ``$GEAR_MLRUNS``, else the checkout's mlruns, else ./mlruns."""
    if named := os.environ.get("GEAR_MLRUNS"):
        return Path(named).expanduser().resolve()
    checkout = Path(__file__).resolve().parents[1]
    home = checkout if (checkout / "run.py").is_file() else Path.cwd()
    return home / "mlruns"


def plain(value: Any) -> Any:
    """Return ``value`` as JSON gives it back (string keys, lists). ValueError for NaN or inf."""
    return json.loads(json.dumps(value, allow_nan=False))


def run_key(config: dict[str, Any]) -> str:
    """Return the sha256 (64 hex) of the canonical JSON of an effective config.

    ValueError where the config holds NaN or infinity, which JSON cannot say.
    """
    canonical = json.dumps(plain(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def record_dir(root: Path, key: str) -> Path:
    """Return the folder of the record ``key``; it need not exist."""
    return root / "records" / key


def load(root: Path, key: str) -> dict[str, Any] | None:
    """Return the record ``key``, or None unless it is there, whole, and its config has that key."""
    try:
        record = json.loads((record_dir(root, key) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or any(name not in record for name in _FIELDS):
        return None
    if record["status"] not in (FINISHED, FAILED) or run_key(record["config"]) != key:
        return None
    return record


def records(root: Path) -> Iterator[dict[str, Any]]:
    """Yield every valid record under ``root``, in the order of their keys."""
    for path in sorted((root / "records").glob(f"*/{RECORD}")):
        if (record := load(root, path.parent.name)) is not None:
            yield record


def failure(
    kind: str, message: str, signal: str | None = None, log_tail: str = ""
) -> dict[str, Any]:
    """Return the body of a FAILED record: nothing measured, and why."""
    error = {"type": kind, "message": message, "signal": signal, "log_tail": log_tail}
    return {"status": FAILED, "metrics": {}, "guards": {}, "error": error}


def commit(root: Path, key: str, record: dict[str, Any]) -> None:
    """Write the record so that a reader sees the old one or the new one, also after a crash.

    ValueError for a value JSON cannot hold; OSError (disk full, read-only) leaves the old record.
    """
    write_whole(
        record_dir(root, key) / RECORD, json.dumps(record, indent=1, allow_nan=False) + "\n"
    )


def write_whole(path: Path, text: str) -> None:
    """Write a file, and its folder where there is none, so that it is there whole or as it was.

    OSError (disk full, read-only) leaves the old file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The pid keeps the key's owner and a tracker that fills in its run id out of each other's file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_run_id(root: Path, key: str, run_id: str) -> str:
    """Fill in a record's ``mlflow_run_id`` once and return the id it holds from then on.

    ValueError when there is no such record.
    """
    record = load(root, key)
    if record is None:
        raise ValueError(f"key={key!r}: must name a record under {root / 'records'}.")
    if record["mlflow_run_id"] is None:
        record["mlflow_run_id"] = run_id
        commit(root, key, record)
    return record["mlflow_run_id"]


@contextmanager
def lock(root: Path, key: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the key's file lock; ``on_wait`` is called once if another process has it now.

    The system frees it with its process, so a killed sweep never blocks the next one.
    """
    folder = record_dir(root, key)
    folder.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder / ".lock")
    try:
        held.acquire(timeout=0)
    except Timeout:
        on_wait()
        held.acquire()
    try:
        yield
    finally:
        held.release()


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Tell whether two records hold the same result.

    Times, machine, run id, speeds and the words that made the job may differ.
    """
    return _result(a) == _result(b)


def _result(record: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a record that must repeat."""
    result = {name: value for name, value in record.items() if name not in _NOT_COMPARED}
    metrics = record["metrics"].items()
    result["metrics"] = {k: v for k, v in metrics if not k.startswith(_NOT_COMPARED_METRICS)}
    return result


class SampleWriter:
    """Write samples one line each, readable up to the last whole line at any moment.

    A fresh file each time, which takes the old one's place with the samples that are ``kept``: a
    dying worker of a killed sweep that still writes cannot reach the new one.
    """

    def __init__(self, path: Path, kept: Iterable[dict[str, Any]] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        self._file = fresh.open("w", encoding="utf-8")
        for sample in kept:
            self.write(sample)
        fresh.replace(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, sample: dict[str, Any]) -> None:
        """Append one sample. ValueError when it holds a number that is not finite."""
        try:
            line = json.dumps(sample, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                f"sample={str(sample)[:300]}: must hold finite numbers only."
            ) from error
        self._file.write(line + "\n")
        self._file.flush()


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the samples of ``samples.jsonl``; a last line that was cut off is dropped.

    ValueError names a broken line before it.
    """
    *whole, _torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    samples = []
    for number, line in enumerate(whole, start=1):
        try:
            samples.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path.name} line {number}={line[:80]!r}: must be JSON; run the job again."
            ) from error
    return samples
