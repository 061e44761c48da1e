"""Which calibration file a job has, and that no job is measured on the text its file is made of.

A file of scripts/calibrate.py has metadata: what its tensors depend on, the model's weight hash,
the dataset's content hash, and the hash of each of its texts. By them `resolve` finds the file of a
job with ``calibration: auto``. Other files say nothing and are taken as they are. No MLX.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from evals.assets import assets_root
from evals.data import DataError, Document, load_documents
from evals.schema import DatasetConfig
from gear.calibration import AUTO, Fitted, reference
from gear.methods import Method

COMMAND = "python scripts/calibrate.py method=METHOD model=MODEL dataset=DATASET"


class CalibrationMissing(DataError):
    """A job's ``auto`` stands for no file, or for several. Only that job fails in a sweep.

    ``config`` is set to what a record would say of the job.
    """

    config: dict[str, Any] = {}  # noqa: RUF012


@dataclass(frozen=True)
class Use:
    """What a file is to be used with: a job's model and text."""

    model: str
    weight_hash: str
    content_hash: str
    dataset: DatasetConfig
    seed: int

    def shares(self, made: Mapping[str, str]) -> bool:
        """Tell whether a file of this metadata was made of some of the job's text."""
        own = set(json.loads(made["texts"]))
        texts = _texts(json.dumps(vars(self.dataset)), self.seed)
        return made["content_hash"] == self.content_hash or not own.isdisjoint(texts)


def folder() -> Path:
    """Return where scripts/calibrate.py puts its files (it may not exist yet)."""
    return assets_root() / "calibration"


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


def check(cache: Mapping[str, Any], use: Use) -> list[dict[str, str]]:
    """Refuse a file made of the job's own text, or with another model; say what the files are.

    ``cache`` is the node with plain values. Raises :class:`DataError`.
    """
    said = []
    for path in dict.fromkeys(files(cache)):
        made = metadata(path)
        content = reference(str(path), 0, "k", "calibration").partition("#")[0]
        said.append({"content": content, **{n: v for n, v in made.items() if n != "texts"}})
        if "content_hash" not in made:
            continue
        if made["weight_hash"] != use.weight_hash:
            raise DataError(
                f"{path}: was calibrated with model={made['model']}, other weights than this job's."
                f" Next step: {COMMAND}"
            )
        if use.shares(made):
            raise DataError(
                f"{path}: was calibrated on dataset={made['dataset']}, which shares text with this"
                f" job's dataset={use.dataset.name}: its numbers would flatter the method. Next"
                f" step: calibrate on another text: {COMMAND}"
            )
    return said


def resolve(cache: Mapping[str, Any], method: Method, n_layers: int, use: Use) -> dict[str, Any]:
    """Return ``cache``, plain values, with the one file that fits in the place of each ``auto``.

    Raises :class:`CalibrationMissing`.
    """
    fits = method.fits(n_layers) if isinstance(method, Fitted) else {}
    if not fits:
        return dict(cache)
    # under GEAR the base that is fitted is a method as well, and calibrate.py takes that
    own = "calibration" in cache
    maker = cache["name"] if own else next(iter(fits.values()))["base"]
    return _put(cache, str(_find(maker, fits, use)))


def _put(cache: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return options with ``path`` in the place of each ``auto``, GEAR's numbers included."""
    return {
        name: path if name == "calibration" and value == AUTO
        else _put(value, path) if isinstance(value, Mapping) else value
        for name, value in cache.items()
    }  # fmt: skip


def _find(maker: str, fits: Mapping[str, Any], use: Use) -> Path:
    """Return the one file for ``fits``, by side what the tensors depend on."""
    reasons: dict[Path, str] = {}
    for path in sorted(folder().glob("*.safetensors")):
        made = metadata(path)
        if "fits" in made:
            reasons[path] = _unfit(made, fits, use)
    found = [path for path, reason in reasons.items() if not reason]
    if len(found) == 1:
        return found[0]
    wanted = " and ".join(dict.fromkeys(json.dumps(of, sort_keys=True) for of in fits.values()))
    listed = "".join(f"\n  {path}: {why or 'fits'}" for path, why in reasons.items()) or " none"
    step = (
        "name one, calibration=FILE." if found else
        f"python scripts/calibrate.py method={maker} model={use.model} dataset=file"
        " dataset.path=FILE.txt, with the job's own cache.* and gear.*, and a text that no job"
        " evaluates."
    )  # fmt: skip
    raise CalibrationMissing(
        f"{maker}: calibration={AUTO} must be one file below {folder()}; {len(found)} fit"
        f" {wanted}, model={use.model} and dataset={use.dataset.name}."
        f" There:{listed}\nNext step: {step}"
    )


def _unfit(made: Mapping[str, str], fits: Mapping[str, Any], use: Use) -> str:
    """Return why a file is not what a job needs; empty where it is."""
    theirs = json.loads(made["fits"])
    if made["weight_hash"] != use.weight_hash:
        return f"made with model={made['model']}, other weights"
    if any(theirs.get(side) != wanted for side, wanted in fits.items()):
        return f"made for {made['fits']}"
    return f"its dataset={made['dataset']} shares text with this job's" if use.shares(made) else ""


@lru_cache(maxsize=32)
def _texts(dataset: str, seed: int) -> frozenset[str]:
    """Return the text hashes of a dataset (as JSON); none where its items are no texts."""
    cfg = DatasetConfig(**json.loads(dataset))
    if cfg.task is not None or cfg.source == "generated":
        return frozenset()
    return frozenset(text_hashes(load_documents(cfg, seed)))
