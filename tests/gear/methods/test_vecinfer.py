"""VecInfer: smoothing, rotation and nearest entries by hand in fp64, k-means, and its file."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from gear import GearConfig, resolve
from gear.bases import load_base
from gear.calibration import tensors
from gear.checks import SettingError
from gear.codebook import k_means, read_codes, store_codes
from gear.codec import compress
from gear.methods.vecinfer import VecInfer
from gear.precision import Store
from tests.gear.base_cases import settings
from tests.gear.calibrated import calibration_file
from tests.gear.oracle_cases import to_numpy


def _x(tokens: int = 64, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(1, 2, tokens, 64)).astype(np.float32)


def _hadamard(n: int) -> np.ndarray:
    """Return Sylvester's orthonormal H."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


def _nearest(vectors: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """Return the nearest entry of each vector [n, dims], by distances."""
    return entries[[int(np.square(entries - v).sum(axis=1).argmin()) for v in vectors]]


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_block_is_the_one_made_by_hand(side: str) -> None:
    x, s = _x(), settings("vecinfer", sparse_frac=0.0)
    one = s.k if side == "k" else s.v
    held = {n: np.array(a, np.float64) for n, a in tensors(one.option("calibration")).items()}
    found = to_numpy(compress(mx.array(x), side, one, s, 0).reconstruct())[0]
    h = _hadamard(64)
    for head in range(2):
        smooth = held["smooth"][head] if side == "k" else np.ones(64)
        z = (x[0, head] / smooth) @ h if side == "k" else x[0, head]
        dims = held["codebook"].shape[1]
        seen = _nearest(z.reshape(-1, dims), held["codebook"]).reshape(64, 64)
        expected = seen @ h * smooth if side == "k" else seen
        same = np.isclose(found[head], expected, atol=1e-4).all(axis=1)
        assert same.mean() > 0.95  # two entries may be equally near
        assert np.linalg.norm(found[head] - expected) < 0.05 * np.linalg.norm(expected)


def test_three_bits_of_keys_one_of_values_and_nothing_else() -> None:
    s = settings("vecinfer", sparse_frac=0.0)
    for side, one, bits in (("k", s.k, 3), ("v", s.v, 1)):
        block = compress(mx.array(_x(100)), side, one, s, 0)
        assert 8 * block.nbytes == bits * 2 * 100 * 64
        assert block.terms()["scales"] == 0


def test_gaussian_error_is_near_what_such_rates_allow() -> None:
    """D(R) of N(0, 1) is 2^-2R: 0.125 and 0.5 of the norm; a codebook must lie above, not far."""
    s = settings("vecinfer", sparse_frac=0.0)
    for side, one, least, most in (("k", s.k, 0.125, 0.25), ("v", s.v, 0.5, 0.6)):
        x = _x(256)
        found = to_numpy(compress(mx.array(x), side, one, s, 0).reconstruct())
        assert least < np.linalg.norm(found - x) / np.linalg.norm(x) < most


def test_smoothing_is_the_root_of_the_largest_key_and_helps_where_channels_are_large() -> None:
    x = _x(512, seed=1)
    x[..., 5] *= 30
    s = resolve(GearConfig(base="vecinfer", base_options={
        "calibration": calibration_file("vecinfer"), "key_code_bits": 8}), 1)[0].k  # fmt: skip
    held = load_base("vecinfer").fit("k", mx.array(x), s, 0)  # type: ignore[attr-defined]
    expected = np.sqrt(np.abs(x).max(axis=(0, 2)))
    assert np.array(held["smooth"]) == pytest.approx(expected, rel=1e-6)
    h, smooth, book = _hadamard(64), expected[:, None], np.array(held["codebook"], np.float64)
    z = ((x[0] / smooth) @ h).reshape(-1, 4)
    seen = (_nearest(z, book).reshape(x[0].shape) @ h) * smooth
    raw = k_means((x[0] @ h).reshape(-1, 4).astype(np.float32), 256, 0)
    plain = _nearest((x[0] @ h).reshape(-1, 4), raw.astype(np.float64)).reshape(x[0].shape) @ h
    small = [i for i in range(64) if i != 5]
    ours, other = (np.linalg.norm((y - x[0])[..., small]) for y in (seen, plain))
    assert ours < 0.8 * other


def test_k_means_finds_separate_clusters_and_is_the_same_twice() -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(16, 4)) * 20
    vectors = np.repeat(centres, 40, axis=0) + 0.01 * rng.normal(size=(640, 4))
    found = k_means(vectors, 64, seed=3)
    assert np.array_equal(found, k_means(vectors, 64, seed=3))
    missed = np.abs(_nearest(vectors, found.astype(np.float64)) - vectors)
    assert missed.max() < 0.1
    few = k_means(vectors[:5], 8, seed=0)
    assert sorted(map(tuple, few[:5])) == sorted(map(tuple, vectors[:5].astype(np.float32)))


@pytest.mark.parametrize("bits", [3, 8, 9, 12, 16])
def test_wide_codes_survive_packing(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, size=(1, 2, 5, 19))
    store = Store()
    store_codes(store, mx.array(codes.astype(np.uint32)), bits)
    assert np.array_equal(np.array(read_codes(store.arrays, bits, 19)), codes)


def test_without_a_file_the_refusal_says_how_to_make_one() -> None:
    with pytest.raises(SettingError, match=r"calibrate\.py method=vecinfer"):
        VecInfer().layers(2)


def test_a_file_of_another_shape_is_refused() -> None:
    s = VecInfer(key_code_bits=10, calibration=calibration_file("vecinfer")).layers(1)[0]
    with pytest.raises(ValueError, match="needed are a codebook"):
        compress(mx.array(_x()), "k", s.k, s, 0)


def test_a_head_dim_without_a_hadamard_matrix_is_refused() -> None:
    with pytest.raises(SettingError, match="power of two"):
        VecInfer(calibration=calibration_file("vecinfer")).check_shape(1, 2, 80, 80)
