"""What a calibration file says of itself, and that no job is measured on the text it is made of.

A file of scripts/calibrate.py has metadata: the model's weight hash, the dataset's content hash,
and the hash of each of its texts. Other files say nothing and are taken as they are. No MLX.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from evals.data import DataError, Document, load_documents
from evals.schema import DatasetConfig

COMMAND = "python scripts/calibrate.py method=METHOD model=MODEL dataset=DATASET"


def text_hashes(documents: Iterable[Document]) -> list[str]:
    """Return the SHA-256 of each document's text, sorted: where it came from does not matter."""
    return sorted({hashlib.sha256(document.text.encode()).hexdigest() for document in documents})


def metadata(path: Path) -> dict[str, str]:
    """Return a safetensors file's metadata; empty where it has none. OSError, ValueError if bad."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return dict(header.get("__metadata__", {}))


def files(cache: Mapping[str, Any]) -> Iterator[Path]:
    """Yield every calibration file that a cache's options name, GEAR's numbers included."""
    for name, value in cache.items():
        if name == "calibration" and value:
            yield Path(str(value)).expanduser()
        elif isinstance(value, Mapping):
            yield from files(value)


def check(
    cache: Mapping[str, Any], weight_hash: str, content_hash: str, dataset: DatasetConfig, seed: int
) -> None:
    """Refuse a file made of the job's own text, or with another model. Raises :class:`DataError`.

    ``cache`` is the node with plain values; ``content_hash`` the job's dataset's.
    """
    for path in dict.fromkeys(files(cache)):
        made = metadata(path)
        if "content_hash" not in made:
            continue
        if made["weight_hash"] != weight_hash:
            raise DataError(
                f"{path}: was calibrated with model={made['model']}, other weights than this job's."
                f" Next step: {COMMAND}"
            )
        shared = made["content_hash"] == content_hash or not set(
            json.loads(made["texts"])
        ).isdisjoint(_texts(json.dumps(vars(dataset)), seed))
        if shared:
            raise DataError(
                f"{path}: was calibrated on dataset={made['dataset']}, which shares text with this"
                f" job's dataset={dataset.name}: its numbers would flatter the method. Next step:"
                f" calibrate on another text: {COMMAND}"
            )


@lru_cache(maxsize=32)
def _texts(dataset: str, seed: int) -> frozenset[str]:
    """Return the text hashes of a dataset (as JSON); none where its items are no texts."""
    cfg = DatasetConfig(**json.loads(dataset))
    if cfg.task is not None or cfg.source == "generated":
        return frozenset()
    return frozenset(text_hashes(load_documents(cfg, seed)))
