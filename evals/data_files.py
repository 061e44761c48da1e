"""Local files as texts (.txt, folders of .txt, .jsonl, .parquet) or as rows (.jsonl, .parquet).

Read directly, without the cache of `datasets`: nothing is written, messages give the line or
byte, and a line of any length is one line.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

FILE_KINDS = "a UTF-8 .txt file, a folder of such files, a .jsonl or a .parquet file"


class DataError(ValueError):
    """A data set, file or document that cannot be evaluated; says where, why and what to do."""


class Row(NamedTuple):
    """A text and the id it would have as a document of its own."""

    id: str
    text: str


def read_path(path: Path, field: str) -> Iterator[Row]:
    """Yield the texts of a file or folder (sorted by name) as they are taken.

    Raises:
        DataError: wrong kind of file, not UTF-8, not JSON, or without `field`.
        OSError: as the system gives it.
    """
    if path.is_dir():
        # files with a dot in front are the system's (macOS leaves ._NAME.txt beside NAME.txt)
        files = sorted(file for file in path.glob("*.txt") if not file.name.startswith("."))
        if not files:
            raise DataError(
                f"a folder without .txt files; expected {FILE_KINDS}. "
                "Next step: name the file itself."
            )
        return _text_files(files)
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return _text_files([path])
    if suffix == ".jsonl":
        return numbered(path.stem, _jsonl(path, field))
    if suffix == ".parquet":
        return numbered(path.stem, _parquet(path, field))
    raise DataError(
        f"ends in {path.suffix!r}; expected {FILE_KINDS}. Next step: convert or rename it."
    )


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .jsonl or .parquet file, with all their fields.

    Raises:
        DataError: another kind of file, not UTF-8, or not one object a line.
        OSError: as the system gives it.
    """
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return (row for _, row in _jsonl_rows(path))
    if suffix == ".parquet":
        return _parquet_rows(path)
    raise DataError(
        f"ends in {path.suffix!r}; expected a .jsonl or a .parquet file. "
        "Next step: convert or rename it."
    )


def numbered(base: str, texts: Iterable[Any]) -> Iterator[Row]:
    """Yield `texts` with the ids base-000000, base-000001, ... and refuse what is no string."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(
                f"row {number} holds {type(text).__name__}, expected text. Next step: set "
                "dataset.text_field to a field of strings, or remove the row."
            )
        yield Row(f"{base}-{number:06d}", text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'x'? " where a known name is near, then all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}Available: {', '.join(names)}"


def check_unchanged(name: str, found: str, expected: str) -> None:
    """Refuse data whose content hash is not the one that a run's key was made from."""
    if found != expected:
        raise DataError(
            f"dataset={name}: its content hash is {found[:12]}, expected {expected[:12]}:"
            " it changed since the run began. Next step: run the command again."
        )


def missing_field(field: str, known: Iterable[str], where: str) -> DataError:
    """Return the error for a row or table without the field that holds the text."""
    return DataError(
        f"{where} has no field dataset.text_field={field!r}; {nearest(field, known)}. "
        "Next step: set dataset.text_field to the field that holds the text."
    )


def _text_files(paths: Iterable[Path]) -> Iterator[Row]:
    for path in paths:
        text = _decode(path.read_bytes(), path.name)
        # so that a checkout which rewrites line ends keeps the content hash
        yield Row(path.stem, text.replace("\r\n", "\n").replace("\r", "\n"))


def _jsonl(path: Path, field: str) -> Iterator[Any]:
    for where, row in _jsonl_rows(path):
        if field not in row:
            raise missing_field(field, row, where)
        yield row[field]


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("line 3", row) of every line that is not blank."""
    offset = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"line {number}"
            text = _decode(line, where, offset)
            offset += len(line)
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{where} is not JSON: {error}. Expected one object a line. "
                    "Next step: repair the line."
                ) from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{where} is a JSON {type(row).__name__}; expected an object of named fields. "
                    "Next step: write one object a line."
                )
            yield where, row


def _parquet(path: Path, field: str) -> Iterator[Any]:
    for row in _parquet_rows(path, field):
        yield row[field]


def _parquet_rows(path: Path, field: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows, with one field or all of them."""
    from pyarrow import ArrowInvalid, parquet

    try:
        with path.open("rb") as raw, parquet.ParquetFile(raw) as file:
            names = file.schema_arrow.names
            if field is not None and field not in names:
                raise missing_field(field, names, "the table")
            for batch in file.iter_batches(columns=names if field is None else [field]):
                yield from batch.to_pylist()
    except (ArrowInvalid, UnicodeDecodeError) as error:
        raise DataError(
            f"not a readable parquet file: {error}. Next step: fetch or write it again."
        ) from error


def _decode(data: bytes, where: str, offset: int = 0) -> str:
    """Decode UTF-8 without its byte order mark; `offset` is where `data` starts in its file."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8: byte 0x{data[error.start]:02x} at offset "
            f"{offset + error.start}; expected UTF-8 text. Next step: convert the file, for "
            "example with `iconv -f latin1 -t utf-8`."
        ) from error
