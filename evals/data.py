"""The documents that are scored: the embedded texts, a local file, or a data set of the hub.

Every source ends as a list of `Document`: an id that is safe as part of a file name, and a
non-empty text. What cannot become that is refused with a `DataError`. The first `limit`
documents are used: nothing is sampled. No remote code, and no MLX.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from evals.data_files import (
    FILE_KINDS,
    DataError,
    Row,
    missing_field,
    nearest,
    numbered,
    read_path,
)
from evals.schema import DatasetConfig

__all__ = ["TEXTS", "DataError", "Document", "content_hash", "load_documents"]

TEXTS = Path(__file__).parent / "texts"
"""The embedded documents; the file names give their order."""
SEPARATOR = "\n\n"
"""Between joined rows, as GPTQ and most papers after it join WikiText's lines."""
MAX_ID_BYTES = 200
SOURCES = ("embedded", "file", "hub")


@dataclass(frozen=True)
class Document:
    """One text. `id` becomes part of file names in the results, so it cannot leave its folder."""

    id: str
    text: str

    def __post_init__(self) -> None:
        """Refuse an id that is not a plain name, and a text that no tokenizer should see."""
        size = len(self.id.encode("utf-8", "surrogatepass"))
        plain = self.id.isprintable() and not re.search(r"^\.|[/\\]", self.id)
        if not plain or not 0 < size <= MAX_ID_BYTES:
            raise DataError(
                f"document id {self.id[:80]!r} is not a plain name; allowed: 1 to {MAX_ID_BYTES} "
                "bytes of printable characters, no '/' or '\\', no '.' in front. "
                "Next step: rename the file."
            )
        if problem := _problem(self.text):
            raise DataError(f"document {self.id!r} {problem}")


def load_documents(cfg: DatasetConfig, seed: int) -> list[Document]:
    """Return the documents of `cfg`: the first `cfg.limit` of them, in the source's order.

    With `cfg.join_documents` all rows make one document, a blank line between them. `seed` is
    the job's; documents taken from the front do not depend on it.

    Raises:
        DataError: the source, a file, a field or a text is missing, unreadable or unusable.
    """
    _check(cfg)
    where = _where(cfg)
    try:
        rows = _rows(cfg)
        if cfg.join_documents:
            rows = iter([Row(_base(cfg), SEPARATOR.join(row.text for row in rows))])
        documents = [Document(*row) for row in islice(rows, cfg.limit)]
    except OSError as error:
        raise DataError(
            f"dataset={cfg.name}, {where}: {error.strerror or error}; expected {FILE_KINDS}. "
            "Next step: check the path and its permissions."
        ) from error
    except DataError as error:
        raise DataError(f"dataset={cfg.name}, {where}: {error}") from error
    if not documents:
        raise DataError(
            f"dataset={cfg.name}, {where}: holds no rows; expected at least one. Next step: "
            "check the file, or dataset.config and dataset.split."
        )
    return documents


def content_hash(documents: Iterable[Document]) -> str:
    """Return the sha256 (64 hex digits) of the ids and texts, in order."""
    pairs = [[document.id, document.text] for document in documents]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def _problem(text: str) -> str:
    if not text.strip():
        return (
            "is empty; expected text. Next step: remove it, or set dataset.join_documents=true "
            "where rows are lines of one text."
        )
    if "\0" in text:
        return (
            f"holds a NUL at character {text.index(chr(0))}; expected text. Next step: save it as "
            "UTF-8 (UTF-16 and binary files hold NUL bytes)."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"holds half a surrogate pair at character {error.start}; expected text. Next step: "
            "repair that \\uD800-\\uDFFF escape."
        )
    return ""


def _check(cfg: DatasetConfig) -> None:
    """Refuse settings that their source cannot use, before anything is read."""
    if cfg.task is not None:
        raise DataError(
            f"dataset.task={cfg.task!r}: a task's items are no texts to score; allowed: null. Next "
            "step: leave eval= out (a task brings eval=downstream), or use a data set of texts."
        )
    if cfg.source not in SOURCES:
        raise DataError(f"dataset.source={cfg.source!r} is unknown: {nearest(cfg.source, SOURCES)}")
    if cfg.limit is not None and cfg.limit < 1:
        raise DataError(
            f"dataset.limit={cfg.limit}: allowed are null (all) and whole numbers from 1. "
            "Next step: give the number of documents to use."
        )
    if cfg.source == "embedded" and cfg.path is not None:
        raise DataError(
            f"dataset.path={cfg.path!r} is not used by the embedded texts; allowed: null. "
            "Next step: add dataset=file."
        )
    if cfg.source == "file" and not cfg.path:
        raise DataError(
            f"dataset.path={cfg.path!r}: dataset=file needs {FILE_KINDS}. "
            "Next step: add dataset.path=FILE."
        )
    if cfg.source == "hub" and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", cfg.repo or "", re.ASCII):
        raise DataError(
            f"dataset.repo={cfg.repo!r} is not a hub id; expected owner/name. Next step: copy it "
            "from the data set's page, or use dataset=file for a local file."
        )


def _where(cfg: DatasetConfig) -> str:
    if cfg.source == "hub":
        return f"{cfg.repo} (config {cfg.config}, split {cfg.split}, revision {cfg.revision})"
    return str(_path(cfg))


def _path(cfg: DatasetConfig) -> Path:
    return TEXTS if cfg.source == "embedded" else Path(str(cfg.path)).expanduser().absolute()


def _base(cfg: DatasetConfig) -> str:
    """Return the id of the joined document, and the start of the ids of numbered rows."""
    return str(cfg.repo).split("/")[1] if cfg.source == "hub" else _path(cfg).stem


def _rows(cfg: DatasetConfig) -> Iterator[Row]:
    return _hub(cfg) if cfg.source == "hub" else read_path(_path(cfg), cfg.text_field)


def _hub(cfg: DatasetConfig) -> Iterator[Row]:
    """Load through `datasets`, which keeps its own cache and honours its offline variables."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    arguments = _hub_arguments(cfg)
    try:
        table = datasets.load_dataset(str(cfg.repo), **arguments)
    except Exception as error:  # `datasets` has a dozen unrelated kinds for "not there"
        raise DataError(_not_loaded(cfg, error, arguments)) from error
    columns = table.column_names
    if cfg.text_field not in columns:
        raise missing_field(cfg.text_field, columns, "the table")
    texts = table.select_columns([cfg.text_field])
    return numbered(_base(cfg), (row[cfg.text_field] for row in texts))


def _hub_arguments(cfg: DatasetConfig) -> dict[str, Any]:
    """Return load_dataset's arguments; `path` picks one file where a config is huge (C4's)."""
    arguments: dict[str, Any] = {"split": cfg.split}
    if cfg.config:
        arguments["name"] = cfg.config
    if cfg.revision:
        arguments["revision"] = cfg.revision
    if cfg.path:
        arguments["data_files"] = {cfg.split.partition("[")[0]: cfg.path}
        # one file has neither the splits nor the sizes that the data set's card announces
        arguments["verification_mode"] = "no_checks"
    return arguments


def _not_loaded(cfg: DatasetConfig, error: Exception, arguments: dict[str, Any]) -> str:
    cause = next(iter(str(error).splitlines()), "").rstrip(".")
    call = ", ".join([repr(cfg.repo), *(f"{key}={value!r}" for key, value in arguments.items())])
    join = " dataset.join_documents=true" if cfg.join_documents else ""
    return (
        f"could not be loaded: {type(error).__name__}: {cause}. Expected: the hub within reach, or "
        "the data set in the cache of `datasets` (HF_HOME; HF_HUB_OFFLINE=1 asks only the cache). "
        "Next step: on a machine with access write the file DATA.parquet:\n"
        "  import datasets\n"
        f"  datasets.load_dataset({call}).to_parquet('DATA.parquet')\n"
        "bring it here and run with\n"
        f"  dataset=file dataset.path=DATA.parquet dataset.text_field={cfg.text_field}{join}"
    )
