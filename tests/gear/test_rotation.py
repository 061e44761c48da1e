"""Rotations and sketches: what they are, that nothing but seed and size shapes them, sizes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from gear.rotation import norms, rotate, rotate_back, sketch
from tests.gear.oracle_cases import to_numpy


def matrix(head_dim: int, seed: int = 0) -> np.ndarray:
    """Return Π [head_dim, head_dim] in fp64, read off the rotated unit vectors."""
    return to_numpy(rotate(mx.eye(head_dim)[None], seed))[0].T


@pytest.mark.parametrize("head_dim", [2, 64, 80, 128, 256])
def test_a_rotation_is_orthogonal_and_undone(head_dim: int) -> None:
    turn = matrix(head_dim)
    assert np.abs(turn @ turn.T - np.eye(head_dim)).max() < 1e-5
    x = np.random.default_rng(0).normal(size=(1, 2, 5, head_dim))
    y = rotate(mx.array(x.astype(np.float32)), 0)
    assert to_numpy(y) == pytest.approx(x @ turn.T, abs=1e-5)
    assert to_numpy(rotate_back(y, 0)) == pytest.approx(x, abs=1e-5)
    assert np.abs(matrix(head_dim, seed=1) - turn).max() > 0.1


def test_powers_of_two_take_sylvesters_matrix_with_signs() -> None:
    """The signs are pinned: a cache that was saved with others could not be read back."""
    hadamard = np.ones((1, 1))
    for _ in range(6):
        hadamard = np.kron(hadamard, [[1, 1], [1, -1]])
    signs = (hadamard @ matrix(64)) * hadamard  # H Π = D₂ H D₁
    assert signs == pytest.approx(np.outer(signs[:, 0], signs[0]) * signs[0, 0], abs=1e-4)
    assert np.rint(signs[0, :12]).tolist() == [-1, -1, -1, 1, 1, 1, -1, -1, -1, 1, 1, 1]
    assert np.rint(signs[:12, 0]).tolist() == [-1, -1, 1, -1, -1, 1, -1, 1, 1, -1, -1, -1]


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_coordinates_of_a_spike_are_nearly_normal(head_dim: int, seed: int) -> None:
    """Mean size and fourth moment are near a normal variable's, 0.80 and 3; of one H: 1 and 1."""
    y = matrix(head_dim, seed) * head_dim**0.5
    assert np.abs(y).max() < 5
    assert np.abs(y).mean() == pytest.approx((2 / np.pi) ** 0.5, abs=0.05)
    assert (y**4).mean() == pytest.approx(3, abs=0.7)


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize(("rows", "head_dim"), [(512, 64), (160, 80), (96, 64)])
def test_every_row_of_a_sketch_is_standard_normal(
    rows: int, head_dim: int, orthogonal: bool
) -> None:
    s = to_numpy(sketch(rows, head_dim, 0, orthogonal=orthogonal))
    assert s.shape == (rows, head_dim)
    assert abs(s.mean()) < 4 / s.size**0.5
    assert np.square(s).mean() == pytest.approx(1, abs=4 * (2 / s.size) ** 0.5)
    assert (s**4).mean() == pytest.approx(3, abs=4 * (96 / s.size) ** 0.5)
    lengths = np.linalg.norm(s, axis=1)
    assert lengths.std() == pytest.approx(0.5**0.5, rel=0.25)  # chi's, not all √d
    angles = (s / lengths[:, None]) @ (s / lengths[:, None]).T - np.eye(rows)
    first = np.abs(angles[:head_dim, :head_dim]).max()
    assert first < 1e-5 if orthogonal else first > 0.2
    assert np.abs(angles[:head_dim, head_dim:]).max() > 0.2


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-9, 1.0, 1e30])
def test_norms_neither_overflow_nor_vanish(size: float) -> None:
    x = np.random.default_rng(0).normal(size=(3, 80))
    found = to_numpy(norms(mx.array((size * x).astype(np.float32))))
    assert found[:, 0] == pytest.approx(size * np.linalg.norm(x, axis=1), rel=1e-5)
