"""Finished records in an object store, for machines without a common folder: ``job.share=URL``.

A store such as S3 has neither rename nor locks; what it does is to put one object whole. So each
record is one object, ``<url>/<key>.zip`` with record, samples and log, and only what is FINISHED is
put there. Jobs still write to the results root, which tables and tracking read. Before a job is
computed its object is looked for, so another machine does not compute it again; two machines at the
same job at the same moment both do, and either object is the result.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evals import record as store
from evals.record import FINISHED, LOG, RECORD, SAMPLES, record_dir

SCHEMES = ("s3", "gs", "az", "abfs", "file")
"""Each is a driver of fsspec: s3fs, gcsfs, adlfs; file is built in."""
FILES = (SAMPLES, LOG, RECORD)


def problem(url: str | None) -> str | None:
    """Say what is wrong with a ``job.share``, None where nothing is. Secrets are left out."""
    if url is None:
        return None
    found = re.fullmatch(r"(\w+)://([^?#]+)", url)
    if found is None or found[1] not in SCHEMES:
        return f"must be null or a URL such as s3://bucket/folder; known: {', '.join(SCHEMES)}"
    if "@" in found[2].partition("/")[0]:
        return "must hold no user name or password: they are the environment's"
    return None


class ShareError(ValueError):
    """A store that does not answer, or refuses; the records are complete all the same."""


class Share:
    """The records below a URL. :class:`ShareError` says what the store answered."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def has(self, key: str) -> bool:
        """Tell whether there is a record ``key``."""
        with self._reached() as (files, folder):
            return files.exists(f"{folder}/{key}.zip")

    def put(self, root: Path, key: str) -> None:
        """Put the record ``key`` of a results root there, in place of what is."""
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as packed:
            for path in (record_dir(root, key) / name for name in FILES):
                if path.is_file():
                    packed.write(path, path.name)
        with self._reached() as (files, folder):
            if self.url.startswith("file:"):  # elsewhere a folder is only a part of a name
                files.makedirs(folder, exist_ok=True)
            files.pipe_file(f"{folder}/{key}.zip", held.getvalue())

    def get(self, root: Path, key: str) -> dict[str, Any] | None:
        """Bring the record ``key`` into a results root; None where there is none that is whole.

        The caller holds the key's lock.
        """
        with self._reached() as (files, folder):
            try:
                data = files.cat_file(f"{folder}/{key}.zip")
            except FileNotFoundError:
                return None
        with TemporaryDirectory(prefix="gear-share-") as scratch:
            record = _unpacked(data, Path(scratch), key)
            if record is None:
                return None
            for name in (SAMPLES, LOG):
                if (path := record_dir(Path(scratch), key) / name).is_file():
                    (record_dir(root, key) / name).write_bytes(path.read_bytes())
        record = {**record, "mlflow_run_id": None}  # a run of another machine's database
        store.commit(root, key, record)
        return record

    @contextmanager
    def _reached(self) -> Iterator[tuple[Any, str]]:
        """Give the file system and the folder in it; every driver has errors of its own."""
        try:
            import fsspec

            yield fsspec.core.url_to_fs(self.url)
        except Exception as error:
            raise ShareError(
                f"job.share={self.url}: {type(error).__name__}: {error}. The records are safe in"
                " the results root; the same command again shares them."
            ) from error


def _unpacked(data: bytes, scratch: Path, key: str) -> dict[str, Any] | None:
    """Unpack an object into a results root of its own; return its record if that is FINISHED."""
    folder = record_dir(scratch, key)
    folder.mkdir(parents=True)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            for name in set(FILES).intersection(packed.namelist()):
                (folder / name).write_bytes(packed.read(name))
    except (zipfile.BadZipFile, zlib.error):
        return None
    record = store.load(scratch, key)
    return record if record is not None and record["status"] == FINISHED else None
