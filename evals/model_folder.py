"""Check a model folder before anything loads it, and read its shape. No MLX here.

A folder is config.json, ``model*.safetensors`` and tokenizer files, as ``mlx_lm`` writes them.
Only the safetensors headers are read, so a cut, swapped or lying file is refused in
milliseconds. Nothing that could run code of the model's author is accepted: no pickle, no
``model_file``, no ``auto_map``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
# What may influence a result; anything else in the folder (README, images) is not hashed.
HASHED_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".txt")
UNREAD_SUFFIXES = (".bin", ".npz", ".pt", ".pth", ".gguf")  # pickle, or not for mlx_lm
UNHASHED_NAMES = ("manifest.json",)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
ITEM_BYTES |= {"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
MAX_DIMENSION = 2**31 - 1  # of an array of MLX
MAX_JSON_BYTES = 200_000_000  # the largest tokenizer.json are below 40 MB
FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class ModelError(ValueError):
    """A model that cannot be used; the text names file or field, what is expected, a next step."""


@dataclass(frozen=True)
class Shape:
    """The K/V shape of a model: layers, K/V heads and channels per head (K and V)."""

    n_layers: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    vocab_size: int
    """0 where config.json does not say it."""


def _broken(path: Path, found: str, hint: str = "") -> ModelError:
    """Return the error for a safetensors file that is not what it claims to be."""
    step = hint or "copy or download the file again"
    return ModelError(f"{path}: {found}; expected a complete safetensors file. Next: {step}.")


def _header_bytes(path: Path) -> bytes:
    """Return the JSON header of a safetensors file, or say what the file is instead."""
    size = path.stat().st_size
    if size == 0:
        raise _broken(path, "the file is empty")
    with path.open("rb") as file:
        start = file.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise _broken(path, "a git-lfs pointer, not the weights", "run `git lfs pull` there")
        if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
            raise _broken(path, "an HTML page (a login or error page was saved)")
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > MAX_HEADER_BYTES or length > size - 8:
            raise _broken(path, f"{size} bytes, but a header of {length} bytes announced")
        file.seek(8)
        return file.read(length)


def read_header(path: Path) -> dict[str, Any]:
    """Return {tensor: {dtype, shape, data_offsets}} of a safetensors file whose size adds up.

    Raises :class:`ModelError` for an empty, cut or padded file, a git-lfs pointer, an HTML page,
    or a header that is not the format's.
    """
    raw = _header_bytes(path)
    try:
        header = json.loads(raw, object_pairs_hook=_once)
        tensors = {k: v for k, v in header.items() if k != "__metadata__"}
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            begin, stop = tensor["data_offsets"]
            if begin != end or stop - begin != _bytes_of(tensor):
                raise _broken(path, f"{name} at bytes {begin} to {stop}, which its header belies")
            end = stop
    except ModelError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"[:200]
        raise _broken(path, f"an unreadable header ({why})") from error
    found = path.stat().st_size - 8 - len(raw)
    if found != end:
        kind = "truncated" if found < end else "longer than its header says"
        raise _broken(path, f"{kind}: {found} bytes of tensor data where {end} are announced")
    return tensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; a name that stands twice is another tensor to another reader."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _bytes_of(tensor: dict[str, Any]) -> int:
    """Return the bytes of a tensor of known type whose dimensions MLX can hold, else ValueError."""
    for size in (*tensor["shape"], *tensor["data_offsets"]):
        if type(size) is not int or size < 0:
            raise ValueError(f"{size!r} where a size must be a whole number from 0")
    if max(tensor["shape"], default=0) > MAX_DIMENSION or tensor["dtype"] not in ITEM_BYTES:
        raise ValueError(f"{tensor['dtype']} {tensor['shape']} is no array of MLX")
    return ITEM_BYTES[tensor["dtype"]] * math.prod(tensor["shape"])


def _read_json(path: Path, purpose: str) -> dict[str, Any]:
    """Return a JSON object from ``path``; anything else is a :class:`ModelError`."""
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= MAX_JSON_BYTES):
            raise OSError("no ordinary file, or a huge one")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path}: not found; expected {purpose}. Next: point model.path at a folder with"
            " config.json, model*.safetensors and the tokenizer files (as mlx_lm.convert writes)."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: not readable as UTF-8 JSON ({error}); expected {purpose}."
            " Next: copy or download the file again."
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object ({purpose}), got a {type(content)}.")
    return content


def _refuse_code(path: Path, content: dict[str, Any]) -> None:
    """Refuse a config that asks to run code that ships with the model."""
    for key in ("model_file", "auto_map"):
        if content.get(key):
            raise ModelError(
                f"{path}: {key}={content[key]!r} asks to run the model's own code; expected a model"
                f" whose architecture mlx-lm implements. Next: remove {key!r} from the file if"
                " mlx-lm knows its model_type, or choose another model."
            )


def _refuse_links(folder: Path) -> None:
    """Refuse links that lead out of the folder, or out of the hub cache that it is a snapshot of.

    A chat template that is a link would carry a file of this machine into prompts and samples.
    """
    home = folder.resolve()
    if home.parent.name == "snapshots" and (home.parent.parent / "blobs").is_dir():
        home = home.parent.parent
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(home):
            raise ModelError(
                f"{path}: a link that leads out of the model's folder; expected its files inside."
                " Next: copy the file there, or point model.path at the folder that holds them."
            )


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of ``folder``; raises :class:`ModelError` where code would be needed."""
    _refuse_links(folder)
    config = _read_json(folder / "config.json", "the model's configuration")
    _refuse_code(folder / "config.json", config)
    tokenizer_config = folder / "tokenizer_config.json"
    if tokenizer_config.exists():
        _refuse_code(tokenizer_config, _read_json(tokenizer_config, "the tokenizer's settings"))
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'}: expected model_type, a name mlx-lm knows.")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{folder}: no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}."
            " Next: copy the tokenizer files of the same model beside the weights."
        )
    return config


def weight_files(folder: Path) -> list[Path]:
    """Return the ``model*.safetensors`` files that ``mlx_lm`` would load, by name.

    Raises :class:`ModelError` when there are none or the index names one that is missing.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        other = sorted(p.name for p in folder.glob("*") if p.suffix in UNREAD_SUFFIXES)
        found = f"only {', '.join(other)}" if other else "no weights"
        raise ModelError(
            f"{folder}: {found}; expected model*.safetensors. Next: convert with"
            " `mlx_lm.convert --hf-path SOURCE --mlx-path FOLDER`."
        )
    index = folder / "model.safetensors.index.json"
    if index.exists():
        mapping = _read_json(index, "the list of weight files").get("weight_map")
        named = set(map(str, mapping.values())) if isinstance(mapping, dict) else set()
        missing = sorted(named - {p.name for p in files})
        if missing:
            raise ModelError(
                f"{folder}: {', '.join(missing)[:300]} named in {index.name} but not found."
                " Next: copy or download the missing files."
            )
    return files


def weight_dtype(headers: list[dict[str, Any]]) -> str:
    """Return the float type that most tensors have: float32, bfloat16, or float16."""
    found = Counter(t["dtype"] for header in headers for t in header.values())
    floats = [name for name, _ in found.most_common() if name in FLOAT_DTYPES]
    return FLOAT_DTYPES[floats[0]] if floats else "float32"


def weight_sizes(headers: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of weights of a float type, and the bytes of all other tensors."""
    floats = packed = 0
    for tensor in (t for header in headers for t in header.values()):
        if tensor["dtype"] in FLOAT_DTYPES:
            floats += math.prod(tensor["shape"])
        else:
            packed += _bytes_of(tensor)
    return floats, packed


def _positive(config: dict[str, Any], field: str, where: Path) -> int:
    """Return an integer field of config.json that must be at least 1."""
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{where}: {field}={value!r}; expected an integer of at least 1, the same in every"
            " layer. Next: choose a model with plain multi-head or grouped-query attention."
        )
    return value


def kv_shape(config: dict[str, Any], folder: Path) -> Shape:
    """Return the K/V shape that config.json (or its nested ``text_config``) announces."""
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config = {**config, **nested}
    where = folder / "config.json"
    heads = _positive(config, "num_attention_heads", where)
    if config.get("num_key_value_heads") is None:
        config = {**config, "num_key_value_heads": heads}
    if config.get("head_dim") is None:
        config = {**config, "head_dim": _positive(config, "hidden_size", where) // heads}
    head_dim = _positive(config, "head_dim", where)
    return Shape(
        n_layers=_positive(config, "num_hidden_layers", where),
        kv_heads=_positive(config, "num_key_value_heads", where),
        head_dim_k=head_dim,
        head_dim_v=head_dim if config.get("v_head_dim") is None else config["v_head_dim"],
        vocab_size=0 if config.get("vocab_size") is None else config["vocab_size"],
    )


def check_sizes(config: dict[str, Any], headers: list[dict[str, Any]], folder: Path) -> None:
    """Refuse a config.json whose model the weights are too few for, before it is built.

    Every layer has a tensor, and no dimension is larger than the weights have bits.
    """
    config = {**config, **(config.get("text_config") or {})}
    tensors = [tensor for header in headers for tensor in header.values()]
    bits = 8 * sum(_bytes_of(tensor) for tensor in tensors)
    limits = {"num_hidden_layers": len(tensors)}
    limits |= dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), bits)
    for field, limit in limits.items():
        value = config.get(field)
        if isinstance(value, int) and value > limit:
            raise ModelError(
                f"{folder / 'config.json'}: {field}={value}; the weights have {len(tensors)}"
                f" tensors of {bits // 8} bytes, expected a config.json that fits them. Next: copy"
                " the config.json of the same model beside them."
            )


def hashed_files(folder: Path) -> list[Path]:
    """Return the files whose content may influence a result, by name."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.suffix in HASHED_SUFFIXES and path.name not in UNHASHED_NAMES
    )
