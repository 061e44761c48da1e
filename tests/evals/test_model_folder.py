"""evals.model_folder: what a folder must be, and how each way of being broken is named."""

import json

import numpy as np
import pytest

from evals.model_folder import (
    ModelError,
    kv_shape,
    read_config,
    read_header,
    weight_dtype,
    weight_files,
)
from tests.evals.model_files import write_safetensors

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


@pytest.fixture
def folder(tmp_path):
    """A folder that passes every check."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    tensors = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(4)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    return tmp_path


def test_a_sound_folder_passes(folder):
    assert read_config(folder) == CONFIG
    (path,) = weight_files(folder)
    header = read_header(path)
    assert header["a"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert weight_dtype([header]) == "float32"


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype: str, shape: list[int], *offsets: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "empty"),
        (LFS, "git lfs pull"),
        (b"\n<!DOCTYPE html><html>" + b" " * 100, "HTML page"),
        (b"<html><head>", "HTML page"),
        (b"\x01\x02", "2 bytes"),
        ((10**15).to_bytes(8, "little") + b"{}", "header of 1000000000000000 bytes"),
        ((500).to_bytes(8, "little") + b"{}", "header of 500 bytes"),
        ((2).to_bytes(8, "little") + b"{]", "unreadable header"),
        ((2).to_bytes(8, "little") + b"[]", "unreadable header"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "unreadable header"),
        (with_header({"a": {"dtype": "F32"}}), "unreadable header"),
        (with_header({"a": tensor("F32", [2], 0, 8)}, b"1234"), "truncated: 4 bytes"),
        (with_header({"a": tensor("F32", [1], 0, 4)}, b"12345678"), "longer"),
        (with_header({"a": tensor("F32", [3], 0, 8)}, b"12345678"), "belies"),
        (with_header({"a": tensor("F32", [1], 4, 8)}, b"12345678"), "belies"),
        (with_header({"a": tensor("X", [1], 8, 0)}, b"12345678"), "belies"),
    ],
)
def test_a_broken_weight_file_is_named_with_what_was_found(tmp_path, content, found):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=found) as error:
        read_header(path)
    assert str(path) in str(error.value)
    assert "Next: " in str(error.value)


@pytest.mark.fault
@pytest.mark.parametrize("cut", [1, 10, 30, 60])
def test_a_file_cut_anywhere_is_refused(folder, cut):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_header(path)


@pytest.mark.fault
@pytest.mark.parametrize("key", ["model_file", "auto_map"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_of_the_models_author_is_refused(folder, name, key):
    (folder / name).write_text(json.dumps({**CONFIG, key: "modeling.py"}))
    with pytest.raises(ModelError, match=f"{name}: {key}='modeling.py'"):
        read_config(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff\xfe"])
def test_a_broken_config_is_named(folder, content):
    (folder / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json: "):
        read_config(folder)


def test_missing_pieces_are_named(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer; expected one of tokenizer\.json"):
        read_config(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="model_type"):
        read_config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: not found"):
        read_config(folder)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin; .*mlx_lm\.convert"):
        weight_files(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="no weights"):
        weight_files(folder)


def test_a_missing_shard_is_named(folder):
    mapping = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": mapping}))
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        weight_files(folder)


def test_the_shape_comes_from_the_config(folder):
    def shape(**changes):
        found = kv_shape({**CONFIG, **changes}, folder)
        return found.n_layers, found.kv_heads, found.head_dim_k, found.head_dim_v

    assert shape() == (3, 2, 16, 16)
    assert shape(head_dim=80) == (3, 2, 80, 80)
    assert shape(head_dim=80, v_head_dim=24) == (3, 2, 80, 24)
    assert shape(num_key_value_heads=None) == (3, 4, 16, 16)
    assert shape(text_config={"num_hidden_layers": 7, "head_dim": 8}) == (7, 2, 8, 8)


@pytest.mark.fault
@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
@pytest.mark.parametrize("value", [None, 0, -1, "4", [4, 4], True])
def test_a_shape_that_is_no_number_is_refused(folder, field, value):
    with pytest.raises(ModelError, match=f"config.json: {field}="):
        kv_shape({**CONFIG, field: value}, folder)


def test_the_commonest_float_type_is_the_weights():
    header = {"a": {"dtype": "BF16"}, "b": {"dtype": "BF16"}, "c": {"dtype": "F32"}}
    packed = {"w": {"dtype": "U32"}, "x": {"dtype": "U32"}, "y": {"dtype": "U32"}}
    assert weight_dtype([header, packed]) == "bfloat16"
    assert weight_dtype([packed]) == "float32"
