"""Which model a config means (:func:`describe`, parent), and the model (:func:`load`, worker).

``describe`` reads configs, headers and hashes and imports no MLX. ``load`` is the one place that
calls mlx_lm's loaders. Sources: ``smollm2`` (the bundled asset, :mod:`evals.assets`), ``tiny``
(:mod:`evals.tiny`), ``hub`` (:mod:`evals.hub`), ``local`` (a folder). Safetensors only, and no
code that ships with a model is ever run.
"""

from __future__ import annotations

import difflib
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evals import assets, hub, tiny
from evals.hashes import cached_sha256, combined_sha256
from evals.model_folder import (
    FLOAT_DTYPES,
    ModelError,
    check_sizes,
    hashed_files,
    kv_shape,
    read_config,
    read_header,
    weight_dtype,
    weight_files,
    weight_sizes,
)
from evals.schema import ModelConfig

if TYPE_CHECKING:
    import mlx.nn as nn

__all__ = ["ModelError", "ModelInfo", "Tokenizer", "compute_dtype", "describe", "load"]

SOURCES = ("smollm2", "tiny", "hub", "local")
DTYPES = ("auto", *FLOAT_DTYPES.values())


@dataclass(frozen=True)
class ModelInfo:
    """What the parent knows of a model without loading it.

    ``config`` goes into the run key and never holds a path; ``weight_dtype`` is the float type
    that most of the stored tensors have. ``dataclasses.asdict`` of this is what :func:`load` takes.
    """

    name: str
    path: Path | None
    weight_hash: str
    n_layers: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    weight_dtype: str
    float_weights: int
    """Weights that are cast to the dtype of computing; quantized ones are not among them."""
    packed_bytes: int
    """Bytes of all other tensors."""
    vocab_size: int
    config: dict[str, Any]


class Tokenizer(Protocol):
    """What the harness needs of a tokenizer. ``encode`` adds no special tokens."""

    @property
    def bos_token_id(self) -> int | None: ...  # noqa: D102

    @property
    def eos_token_id(self) -> int | None: ...  # noqa: D102

    def encode(self, text: str) -> list[int]: ...  # noqa: D102

    def decode(self, ids: list[int]) -> str: ...  # noqa: D102


class TextTokenizer:
    """The tokenizer of a model folder, without special tokens added or spaces cleaned up."""

    def __init__(self, tokenizer: Any) -> None:
        self.wrapped = tokenizer
        """mlx-lm's own, which knows chat templates and every EOS id."""
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text`` alone."""
        # verbose=False: a text longer than the context is normal here, windows are cut from it
        return self.wrapped.encode(text, add_special_tokens=False, verbose=False)

    def decode(self, ids: list[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        return self.wrapped.decode(ids, clean_up_tokenization_spaces=False)


def _require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Refuse a value of ``model.<field>``."""
    if not condition:
        raise ModelError(f"model.{field}={value!r}: must be {allowed}.")


def _describe_tiny(cfg: ModelConfig) -> ModelInfo:
    """Return the description of the random model; it has no files."""
    for field in ("layers", "heads", "kv_heads", "head_dim"):
        value = getattr(cfg, field)
        _require(value >= 1, field, value, "an integer of at least 1")
    _require(cfg.heads % cfg.kv_heads == 0, "kv_heads", cfg.kv_heads, f"a divisor of {cfg.heads}")
    _require(cfg.head_dim % 2 == 0, "head_dim", cfg.head_dim, "even (rotary pairs)")
    _require(cfg.vocab_size > tiny.BOS, "vocab_size", cfg.vocab_size, "at least 257 (bytes, BOS)")
    _require(cfg.seed >= 0, "seed", cfg.seed, "an integer of at least 0")
    sizes = {field: getattr(cfg, field) for field in tiny.SIZES}
    return ModelInfo(
        name=cfg.name,
        path=None,
        weight_hash=tiny.weights_hash(sizes),
        n_layers=cfg.layers,
        kv_heads=cfg.kv_heads,
        head_dim_k=cfg.head_dim,
        head_dim_v=cfg.head_dim,
        weight_dtype="float32",
        float_weights=tiny.count_weights(sizes),
        packed_bytes=0,
        vocab_size=cfg.vocab_size,
        config={"source": "tiny", **sizes},
    )


def _describe_folder(name: str, folder: Path, root: Path, config: dict[str, Any]) -> ModelInfo:
    """Check a folder and return its description; ``config`` is what the key says of its origin."""
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: no such folder; expected config.json, model*.safetensors and tokenizer"
            " files. Next: check model.path."
        )
    settings = read_config(folder)
    shape = kv_shape(settings, folder)
    headers = [read_header(path) for path in weight_files(folder)]
    check_sizes(settings, headers, folder)
    float_weights, packed_bytes = weight_sizes(headers)
    return ModelInfo(
        name=name,
        path=folder.resolve(),
        weight_hash=combined_sha256(cached_sha256(hashed_files(folder), root)),
        n_layers=shape.n_layers,
        kv_heads=shape.kv_heads,
        head_dim_k=shape.head_dim_k,
        head_dim_v=shape.head_dim_v,
        weight_dtype=weight_dtype(headers),
        float_weights=float_weights,
        packed_bytes=packed_bytes,
        vocab_size=shape.vocab_size,
        config=config,
    )


def describe(cfg: ModelConfig, root: Path) -> ModelInfo:
    """Return what a model config means, checked, without loading it.

    ``root`` is the results root, whose ``cache/hashes.json`` remembers hashes. A hub model may be
    downloaded here. Raises :class:`ModelError` naming file or field, expectation and next step.
    """
    _require(cfg.dtype in DTYPES, "dtype", cfg.dtype, f"one of {', '.join(DTYPES)}")
    if cfg.source == "tiny":
        return _describe_tiny(cfg)
    if cfg.source == "smollm2":
        folder = assets.smollm2_dir()
        assets.check(folder, root)
        return _describe_folder(cfg.name, folder, root, {"source": "smollm2"})
    if cfg.source == "local":
        if not cfg.path:
            raise ModelError(
                "model.path is not set: model=local needs a folder with config.json,"
                " model*.safetensors and tokenizer files. Next: add model.path=FOLDER."
            )
        return _describe_folder(cfg.name, Path(cfg.path).expanduser(), root, {"source": "local"})
    if cfg.source == "hub":
        if not cfg.repo:
            raise ModelError(
                "model.repo is not set: model=hub needs a Hugging Face id. Next: add"
                " model.repo=OWNER/NAME, for example mlx-community/Llama-3.2-1B-Instruct-4bit."
            )
        folder, commit = hub.snapshot(cfg.repo, cfg.revision)
        origin = {"source": "hub", "repo": cfg.repo, "revision": commit}
        return _describe_folder(cfg.repo if cfg.name == "hub" else cfg.name, folder, root, origin)
    near = difflib.get_close_matches(str(cfg.source), SOURCES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ModelError(f"model.source={cfg.source!r}: must be one of {', '.join(SOURCES)}{hint}")


def compute_dtype(cfg: ModelConfig, info: ModelInfo, backend: str) -> str:
    """Return the dtype to compute in: as asked, else float32 on the CPU and the weights' elsewhere.

    The CPU emulates half precision (8 to 20 times slower than float32).
    """
    if cfg.dtype != "auto":
        return cfg.dtype
    return "float32" if backend == "cpu" else info.weight_dtype


def load(info: dict[str, Any], dtype: str) -> tuple[nn.Module, Tokenizer]:
    """Return (model, tokenizer) for a described model (worker side; imports MLX).

    ``info`` is ``dataclasses.asdict`` of a :class:`ModelInfo`, its path as a Path or a str.
    ``dtype`` is float32, float16 or bfloat16: floating tensors are cast to it, scales and biases
    of quantised weights included; the packed weights stay as they are. Where the weights already
    are mostly of that type nothing is cast. Never touches the network.
    Raises :class:`ModelError` when mlx_lm cannot build the model from the folder.
    """
    import mlx.core as mx

    if info["config"]["source"] == "tiny":
        model, tokenizer = tiny.build(info["config"]), tiny.ByteTokenizer()
    else:
        model, tokenizer = _load_folder(Path(info["path"]))
    if dtype != info["weight_dtype"]:
        model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model, tokenizer


def _load_folder(folder: Path) -> tuple[nn.Module, Tokenizer]:
    """Return model and tokenizer of a folder, the weights not read yet."""
    from mlx_lm.utils import load_model, load_tokenizer

    local = {"trust_remote_code": False, "local_files_only": True}
    try:
        model, config = load_model(folder, lazy=True, trust_remote_code=False)
        ends = config.get("eos_token_id")
        tokenizer = TextTokenizer(load_tokenizer(folder, local, eos_token_ids=ends))
    except Exception as error:
        # mlx_lm raises whatever a missing key or a wrong shape leads to, over many lines
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise ModelError(
            f"{folder}: mlx_lm cannot load it ({why}); expected a model"
            " whose model_type it implements, with weights and tokenizer that fit config.json."
            " Next: convert it again with `mlx_lm.convert`, or choose another model."
        ) from error
    return model, tokenizer
