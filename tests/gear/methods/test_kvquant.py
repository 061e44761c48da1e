"""kvquant: Lloyd-Max's known errors, levels and codes against fp64 by hand, the calibrated form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gear import GearCache, GearConfig
from gear.bytes import block_terms
from gear.checks import SettingError
from gear.codec import compress
from gear.config import LayerSettings
from gear.methods.kvquant import KvQuant
from gear.nuq import lloyd_max
from gear.outliers import Rows
from tests.gear.base_cases import normal
from tests.gear.oracle_cases import to_numpy

KNOWN = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Least mean squared error of 2^b levels for N(0, 1): Max (1960), table I."""


def _settings(**options: Any) -> LayerSettings:
    return KvQuant(GearConfig(), **options).layers(1)[0]


def _lloyd(x: np.ndarray, levels: np.ndarray, rounds: int) -> np.ndarray:
    """Go on with Lloyd's two steps in fp64 from ``levels`` of one vector."""
    for _ in range(rounds):
        codes = np.abs(x[:, None] - levels).argmin(axis=1)
        own = [x[codes == j] for j in range(len(levels))]
        levels = np.array([o.mean() if o.size else v for o, v in zip(own, levels, strict=True)])
    return levels


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_normal_variable_gets_lloyd_and_maxs_levels(bits: int) -> None:
    x = np.random.default_rng(bits).normal(size=(1, 1, 1, 200_000))
    found = to_numpy(lloyd_max(Rows(mx.array(x.astype(np.float32))), mx.array(x.astype(np.float32)),
                               bits, shared=False))[0, 0, 0]  # fmt: skip
    error = np.square(np.abs(x.ravel()[:, None] - found).min(axis=1)).mean()
    assert error == pytest.approx(KNOWN[bits], rel=0.02)
    if bits == 2:
        assert found == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=0.02)


@pytest.mark.parametrize("side", ["k", "v"])
def test_levels_belong_to_channels_of_k_and_tokens_of_v(side: str) -> None:
    """Each vector's levels are its own fixed point, and its codes the nearest of them."""
    s, x = _settings(sparse_frac=0.0), np.array(normal(128))
    block = compress(mx.array(x), side, s.k, s, 0)
    rows = x.swapaxes(-1, -2) if side == "k" else x
    levels = to_numpy(block.arrays["levels"])
    levels = levels[:, :, 0] if side == "k" else levels
    assert levels.shape == (*rows.shape[:3], 8)
    found = to_numpy(block.reconstruct())
    found = found.swapaxes(-1, -2) if side == "k" else found
    best = np.abs(rows[..., None] - levels[..., None, :]).min(axis=-1)
    assert np.abs(np.abs(rows - found) - best).max() < 1e-6
    for row in (0, 5, 17):
        vector = rows[0, 1, row].astype(np.float64)
        more = _lloyd(vector, levels[0, 1, row].astype(np.float64), 30)
        left = np.square(np.abs(vector[:, None] - more).min(axis=1)).mean()
        assert np.square(best[0, 1, row]).mean() < 1.15 * left + 1e-9


def test_outliers_are_the_papers_dense_and_sparse() -> None:
    """The ends of each vector are kept, and the levels are those of the vector without them."""
    s, x = _settings(sparse_frac=0.05), np.array(normal(128))
    found = to_numpy(compress(mx.array(x), "v", s.v, s, 0).reconstruct())
    order = x.argsort(axis=-1)
    ends = np.concatenate([order[..., :2], order[..., -2:]], axis=-1)  # 5% of 64, half an end
    kept = np.take_along_axis(found - x, ends, -1)
    assert np.abs(kept).max() < 4e-3
    wild = x.copy()
    np.put_along_axis(wild, ends[..., -1:], 1000.0, -1)
    other = to_numpy(compress(mx.array(wild), "v", s.v, s, 0).reconstruct())
    same = np.ones(x.shape, bool)
    np.put_along_axis(same, ends[..., -1:], False, -1)
    assert np.array_equal(found[same], other[same])


@pytest.mark.parametrize("side", ["k", "v"])
def test_shared_levels_take_far_fewer_bytes_for_a_little_error(side: str) -> None:
    x, sizes, errors = normal(128), [], []
    for form in ("vector", "shared"):
        s = _settings(signposts=form, sparse_frac=0.0)
        block = compress(x, side, s.k, s, 0)
        sizes.append(block.terms())
        errors.append(float(mx.square(block.reconstruct() - x).sum()))
        assert block.terms() == block_terms(side, s.k, s.outlier_stage, 2, 128, 64, 0)
    assert sizes[0]["codes"] == sizes[1]["codes"]
    rows = 64 if side == "k" else 128
    assert [size["scales"] for size in sizes] == [2 * rows * 16, 2 * (rows * 4 + 16)]
    assert errors[0] < errors[1] < 2 * errors[0]


def test_levels_of_a_file_are_used_and_take_no_bytes(tmp_path: Path) -> None:
    posts = np.sort(np.random.default_rng(0).uniform(size=(2, 8))).astype(np.float32)
    file = str(tmp_path / "posts.safetensors")
    mx.save_safetensors(file, {"0.k.signposts": mx.array(posts[0]),
                               "0.v.signposts": mx.array(posts)})  # fmt: skip
    s, x = _settings(calibration=file, sparse_frac=0.0), np.array(normal(128))
    for side, own in (("k", posts[:1, None, None]), ("v", posts[:, None, None])):
        settings = getattr(s, side)
        block = compress(mx.array(x), side, settings, s, 0)
        assert block.arrays.keys() == {"codes", "scale", "zero"}
        assert block.terms() == block_terms(side, settings, s.outlier_stage, 2, 128, 64, 0)
        rows = (x.swapaxes(-1, -2) if side == "k" else x).astype(np.float64)
        low, high = rows.min(axis=-1, keepdims=True), rows.max(axis=-1, keepdims=True)
        unit = (rows - low) / (high - low)
        miss = np.abs(unit[..., None] - own).min(axis=-1) * (high - low)
        found = to_numpy(block.reconstruct())
        found = found.swapaxes(-1, -2) if side == "k" else found
        assert np.abs(np.abs(rows - found) - miss).max() < 0.01 * (high - low).max()
        assert block.settings.option("calibration").startswith("sha256:")


def test_defaults_are_the_papers() -> None:
    s = _settings()
    assert (s.k.bits, s.k.sparse_frac, s.n_sink, s.n_b, s.k.rank) == (3, 0.01, 1, 128, 0)
    x = normal(200)
    cache = GearCache(s)
    cache.update_and_fetch(x, x)
    cache.flush()
    assert mx.array_equal(cache.reconstruct()[0][:, :, :1], x[:, :, :1])
    assert cache.cache_bytes().terms["outliers"] > 0
    with pytest.raises(SettingError, match="signposts='all'"):
        _settings(signposts="all")
    with pytest.raises(SettingError, match=r"bits=5: must be an integer in \[1, 4\]"):
        _settings(bits=5)
