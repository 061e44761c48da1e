"""CommVQ: sums of entries and their turns by hand in fp64, the fit's equations, RoPE, its file."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from gear.bases import load_base
from gear.calibration import tensors
from gear.checks import SettingError
from gear.codec import compress
from gear.commutative import PASSES, RIDGE, _best, decode, encode, fit
from gear.methods.commvq import CommVq
from gear.pack import unpack
from tests.gear.base_cases import settings
from tests.gear.calibrated import calibration_file
from tests.gear.oracle_cases import to_numpy


def _x(tokens: int = 64, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(1, 2, tokens, 64)).astype(np.float32)


def _blocks(entries: np.ndarray, second: bool) -> np.ndarray:
    """Return [1 0]·C or [0 1]·C of each pair's C = [[x, y], [-y, x]], [..., head_dim]."""
    x, y = np.split(entries, 2, axis=-1)
    c = np.stack([np.stack([x, y], axis=-1), np.stack([-y, x], axis=-1)], axis=-2)
    picked = np.array([0.0, 1.0] if second else [1.0, 0.0]) @ c
    return np.concatenate([picked[..., 0], picked[..., 1]], axis=-1)


def _tables(codebook: np.ndarray, side: str) -> list[np.ndarray]:
    """Return one head's entries [size, head_dim] by code."""
    turns = (False, True) if side == "k" else (False,)
    return [_blocks(stage, second) for stage in codebook for second in turns]


def _search(x: np.ndarray, tables: list[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """Return the codes of one vector and their sum: greedy, then PASSES times code by code."""
    picked: list[int] = []
    for step in range((PASSES + 1) * len(tables)):
        i = step % len(tables)
        others = sum((tables[j][c] for j, c in enumerate(picked) if j != i), start=0 * x)
        best = int(np.square(x - others - tables[i]).sum(axis=1).argmin())
        picked[i : i + 1] = [best]
    return picked, sum((tables[j][c] for j, c in enumerate(picked)), start=0 * x)


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Return x with each pair (i, i + head_dim/2) turned, as RoPE does."""
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_block_is_the_one_made_by_hand(side: str) -> None:
    x, s = _x(24), settings("commvq", sparse_frac=0.0)
    one = s.k if side == "k" else s.v
    held = {n: np.array(a, np.float64) for n, a in tensors(one.option("calibration")).items()}
    found = to_numpy(compress(mx.array(x), side, one, s, 0).reconstruct())[0]
    for head in range(2):
        tables, mean = _tables(held["codebook"][head], side), held["mean"][head]
        assert len(tables) == (20 if side == "k" else 21)
        expected = [_search(v - mean, tables)[1] + mean for v in x[0, head].astype(np.float64)]
        same = np.isclose(found[head], expected, atol=1e-4).all(axis=1)
        assert same.mean() > 0.9  # two entries may be equally near


def test_decoding_of_keys_commutes_with_rope() -> None:
    """Rotate the decoded key, or decode with rotated entries: the same; values' would not."""
    rng = np.random.default_rng(3)
    codebook = rng.normal(size=(2, 5, 16, 64)).astype(np.float32)
    codes = mx.array(rng.integers(0, 16, size=(1, 2, 7, 10)).astype(np.uint32))
    for position in (1, 17, 4000):
        angles = position * 10000.0 ** (-np.arange(32) / 32)
        turned = mx.array(_rotate(codebook, angles).astype(np.float32))
        one = _rotate(np.array(decode(codes, mx.array(codebook), True)), angles)
        other = np.array(decode(codes, turned, True))
        assert np.abs(one - other).max() < 1e-5 * np.abs(one).max()
    a, b = (codes[..., i::2] for i in (0, 1))
    plain = decode(a, mx.array(codebook), False) + decode(b, mx.array(codebook)[..., ::-1], False)
    mirrored = decode(a, turned, False) + decode(b, turned[..., ::-1], False)
    assert np.abs(_rotate(np.array(plain), angles) - np.array(mirrored)).max() > 0.1


@pytest.mark.parametrize("bits", [1, 2])
def test_whole_bits_an_element_and_nothing_else(bits: int) -> None:
    s = settings("commvq", sparse_frac=0.0, bits=bits)
    for side, one in (("k", s.k), ("v", s.v)):
        block = compress(mx.array(_x(100)), side, one, s, 0)
        assert 8 * block.nbytes == bits * 2 * 100 * 64
        assert block.terms()["scales"] == 0


def test_one_bit_is_the_first_half_of_the_file_for_two() -> None:
    x, s, t = _x(40), settings("commvq", sparse_frac=0.0), settings("commvq", bits=1)
    held = tensors(s.k.option("calibration"))
    block = compress(mx.array(x), "k", t.k, t, 0)
    codes = unpack(block.arrays["codes"], 6, 10)
    again = encode(mx.array(x) - held["mean"][:, None], held["codebook"][:, :5], True)
    assert np.array_equal(np.array(codes).reshape(again.shape), np.array(again))


def test_gaussian_error_lies_above_what_the_rates_allow_and_not_far() -> None:
    """D(R) of N(0, 1) is 2^-2R: 0.25 and 0.5 of the norm at 2 and 1 bits; fitted on 1024 tokens."""
    x, y = _x(1024, seed=1)[0], mx.array(_x(256, seed=2))
    for paired in (True, False):
        codebook, mean = fit(x[:1], 21 // (1 + paired), 64, paired, 0)
        y1 = y[:, :1] - mx.array(mean)[:, None]
        errors = []
        for stages in (21 // (1 + paired) // 2, None):
            book = mx.array(codebook[:, :stages])
            found = decode(encode(y1, book, paired), book, paired)
            errors.append(float(mx.linalg.norm(found - y1) / mx.linalg.norm(y1)))
        assert 0.5 < errors[0] < 0.75
        assert 0.25 < errors[1] < 0.55


def test_searching_again_never_loses_and_helps() -> None:
    x = mx.array(_x(128, seed=4))
    held = tensors(settings("commvq").k.option("calibration"))
    missed = [
        mx.square(x - decode(encode(x, held["codebook"], True, n), held["codebook"], True))
        for n in range(3)
    ]
    sums = [np.array(m.sum(axis=-1)) for m in missed]
    assert (sums[1] <= sums[0] * (1 + 1e-5)).all()
    assert (sums[2] <= sums[1] * (1 + 1e-5)).all()
    assert sums[2].mean() < 0.98 * sums[0].mean()


def test_the_entries_of_a_stage_solve_its_least_squares() -> None:
    """By a dense fp64 system in the real coordinates of the entries, ridge included."""
    rng = np.random.default_rng(5)
    x, codes = rng.normal(size=(50, 8)), rng.integers(0, 6, size=(50, 2))
    wide = []  # x = wide · entries, flattened
    for a, b in codes:
        rows = np.zeros((8, 6, 8))
        for basis in range(8):
            unit = np.eye(8)[basis]
            rows[:, a, basis] += _blocks(unit, False)
            rows[:, b, basis] += _blocks(unit, True)
        wide.append(rows.reshape(8, 48))
    s = np.concatenate(wide)
    expected = np.linalg.solve(s.T @ s + RIDGE * np.eye(48), s.T @ x.ravel()).reshape(6, 8)
    found = _best(x.astype(np.float32), codes, 6)
    assert np.abs(found - expected).max() < 1e-5
    means = _best(x.astype(np.float32), codes[:, :1], 6)
    for entry in range(6):
        own = x[codes[:, 0] == entry]
        assert means[entry] == pytest.approx(own.sum(axis=0) / (len(own) + RIDGE), abs=1e-5)


def test_a_fit_is_the_same_twice_and_takes_windows_one_after_another() -> None:
    base, s = load_base("commvq"), settings("commvq", bits=1)
    x = mx.array(np.concatenate([_x(64, seed=1), _x(64, seed=2)]))
    one, other = (base.fit("k", x, s.k, 7) for _ in range(2))  # type: ignore[attr-defined]
    joined = mx.concatenate([x[:1], x[1:]], axis=2)
    third = base.fit("k", joined, s.k, 7)  # type: ignore[attr-defined]
    assert one["codebook"].shape == (2, 5, 64, 64)
    for name, array in one.items():
        assert mx.array_equal(array, other[name])
        assert mx.array_equal(array, third[name])
        assert bool(mx.isfinite(array).all())


def test_fewer_tokens_than_entries_and_constant_tokens_are_fitted() -> None:
    for x in (_x(5)[0], np.ones((2, 40, 64), np.float32)):
        codebook, mean = fit(x, 3, 16, True, 0)
        codes = encode(mx.array(x - mean[:, None])[None], mx.array(codebook), True)
        found = np.array(decode(codes, mx.array(codebook), True))[0] + mean[:, None]
        assert np.isfinite(found).all()
        assert np.linalg.norm(found - x) < np.linalg.norm(x)


def test_without_a_file_the_refusal_says_how_to_make_one() -> None:
    with pytest.raises(SettingError, match=r"calibrate\.py method=commvq"):
        CommVq().layers(2)


def test_a_file_of_another_shape_is_refused() -> None:
    file = calibration_file("commvq")
    for method in (CommVq(code_bits=4, calibration=file), CommVq(bits=3, calibration=file)):
        s = method.layers(1)[0]
        with pytest.raises(ValueError, match="needed are a codebook"):
            compress(mx.array(_x()), "k", s.k, s, 0)


@pytest.mark.parametrize(("head_dim", "message"), [(63, "no pairs"), (4, "at most 2")])
def test_a_head_dim_without_pairs_or_codes_is_refused(head_dim: int, message: str) -> None:
    method = CommVq(calibration=calibration_file("commvq"), bits=1)
    with pytest.raises(SettingError, match=message):
        method.check_shape(1, 2, head_dim, 64)
