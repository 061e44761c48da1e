"""kvquant: Lloyd-Max's known errors, levels and codes against fp64 by hand, the calibrated form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gear import GearCache, GearConfig
from gear.bytes import block_terms
from gear.calibration import Seen
from gear.checks import SettingError
from gear.codec import compress
from gear.config import LayerSettings
from gear.methods.kvquant import KvQuant, KvQuantBase
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


def _windows(seed: int, windows: int = 3) -> np.ndarray:
    """Return skewed values [windows, 2, 256, 64] with a range of its own in every channel."""
    rng = np.random.default_rng(seed)
    x = rng.exponential(size=(windows, 2, 256, 64)) * np.exp(rng.normal(size=(1, 2, 1, 64)))
    return x.astype(np.float32)


def _unit(x: np.ndarray, side: str) -> np.ndarray:
    """Return the rows of windows in their own ranges, in fp64."""
    rows = (x.swapaxes(-1, -2) if side == "k" else x).astype(np.float64)
    low, high = rows.min(axis=-1, keepdims=True), rows.max(axis=-1, keepdims=True)
    return ((rows - low) / (high - low)).ravel()


@pytest.mark.parametrize("side", ["k", "v"])
def test_fitted_signposts_are_lloyds_of_the_rows_in_their_windows_ranges(side: str) -> None:
    s, x = _settings(sparse_frac=0.0).k, _windows(0)
    fit = KvQuantBase().fit
    levels = np.array(fit(side, mx.array(x), s, 0)["signposts"], np.float64)
    unit = _unit(x, side)
    error = np.square(np.abs(unit[:, None] - levels).min(axis=1)).mean()
    best = _lloyd(unit, np.quantile(unit, (np.arange(8) + 0.5) / 8), 100)
    least = np.square(np.abs(unit[:, None] - best).min(axis=1)).mean()
    even = np.square(np.abs(unit[:, None] - np.linspace(0, 1, 8)).min(axis=1)).mean()
    assert error < 1.1 * least
    assert error < 0.75 * even
    x[1] *= 1000  # a window is a block: its size is its range's
    assert np.array(fit(side, mx.array(x), s, 1)["signposts"]) == pytest.approx(levels, abs=2e-3)


def test_outliers_take_no_part_in_the_fit() -> None:
    s, x = _settings(sparse_frac=0.02).k, _windows(1)
    clean = np.array(KvQuantBase().fit("k", mx.array(x), s, 0)["signposts"])
    x[:, :, 7] = 1e4  # in every channel the largest: one of the 3 that are kept apart
    wild = np.array(KvQuantBase().fit("k", mx.array(x), s, 0)["signposts"])
    assert wild == pytest.approx(clean, abs=0.02)


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_fitted_file_serves_other_values_for_no_bytes(side: str, tmp_path: Path) -> None:
    """Near the error of levels fitted on the block itself, and well below even ones."""
    method = KvQuant(GearConfig(), calibration="auto", sparse_frac=0.0)
    fitted = method.fit(0, 1, Seen(mx.array(_windows(2)), mx.array(_windows(2))), 0)
    even = {name: mx.array(np.linspace(0, 1, 8).astype(np.float32)) for name in fitted}
    x, errors, scales = mx.array(_windows(2)[:1, :, ::-1] * 0.9), [], []
    for number, held in enumerate((fitted, even, None)):
        file = str(tmp_path / f"{number}.safetensors")
        mx.save_safetensors(file, {f"0.{name}": array for name, array in (held or even).items()})
        own = {"calibration": file} if held else {"signposts": "shared"}
        s = _settings(sparse_frac=0.0, **own)
        block = compress(x, side, getattr(s, side), s, 0)
        errors.append(float(mx.square(block.reconstruct() - x).sum()))
        scales.append(block.terms()["scales"])
    assert errors[0] < 1.15 * errors[2]
    assert errors[0] < 0.85 * errors[1]
    assert scales[0] == scales[2] - 2 * 2 * 8


def test_sinks_are_out_of_the_fit_and_what_it_depends_on_is_said() -> None:
    method = KvQuant(GearConfig(), calibration="auto", sparse_frac=0.0, bits=2)
    x, wild = _windows(3), _windows(3)
    wild[:, :, 0] = 1e6
    found = [
        {n: np.array(a) for n, a in method.fit(0, 1, Seen(mx.array(y), mx.array(y)), 0).items()}
        for y in (x, wild)
    ]
    assert found[0].keys() == {"k.signposts", "v.signposts"}
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    own = {"base": "kvquant", "n_sink": 1, "bits": 2, "sparse_frac": 0.0}
    assert method.fits(2) == {"k": own, "v": own}
    assert KvQuant(GearConfig()).fits(2) == {}


def test_a_file_of_other_bits_is_refused_and_auto_names_none(tmp_path: Path) -> None:
    file = str(tmp_path / "two.safetensors")
    levels = mx.array(np.linspace(0, 1, 16).astype(np.float32))  # 16: two heads of 8, or 4 bits
    mx.save_safetensors(file, {"0.k.signposts": levels})
    for path, reason in ((file, r"must be \[8\] or \[2, 8\], got \(16,\)"), ("auto", "by itself")):
        s = _settings(calibration=path)
        with pytest.raises(ValueError, match=reason):
            compress(normal(128), "k", s.k, s, 0)


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
