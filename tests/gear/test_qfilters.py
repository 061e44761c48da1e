"""Q-Filters against an fp64 oracle by eigenvectors, and what its filter finds."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from gear.calibration import Fitted, Seen
from gear.evicting import EvictingCache
from gear.methods.qfilters import QFilters, filters

B, KV, GROUP, N, D, BUDGET = 2, 2, 3, 50, 16, 12


def _data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(B, KV, N, D))
    queries = rng.normal(size=(B, KV, GROUP, 9, D)) + 2 * rng.normal(size=(B, KV, GROUP, 1, D))
    return keys.astype(np.float32), queries.astype(np.float32)


def _oracle(queries: np.ndarray) -> np.ndarray:
    """Return the mean filter of each KV head: main eigenvectors of Qᵀ·Q, in fp64."""
    out = np.zeros((B, KV, D))
    for b in range(B):
        for h in range(KV):
            for one in queries[b, h].astype(np.float64):
                u = np.linalg.eigh(one.T @ one)[1][:, -1]
                out[b, h] += u * np.sign((one @ u).mean()) / GROUP
    return out


def test_filters_are_the_queries_main_directions_and_point_their_way() -> None:
    _, queries = _data()
    np.testing.assert_allclose(filters(mx.array(queries)), _oracle(queries), atol=1e-6)
    np.testing.assert_allclose(filters(-mx.array(queries)), -_oracle(queries), atol=1e-6)


def test_each_head_keeps_the_keys_farthest_along_its_filter() -> None:
    keys, queries = _data()
    chosen = QFilters(budget=BUDGET).choose(mx.array(keys), mx.array(queries), 0, BUDGET)
    scores = np.einsum("bhnd,bhd->bhn", keys.astype(np.float64), _oracle(queries))
    for b in range(B):
        for h in range(KV):
            assert list(chosen[b][h]) == sorted(np.argsort(-scores[b, h])[:BUDGET])


def test_keys_that_the_queries_attend_to_are_kept() -> None:
    """Uncentred queries have a mean; keys along it win all attention, and are what is kept."""
    keys, queries = _data()
    mean = queries.mean(axis=(2, 3))
    keys[:, :, 7::10] += 3 * mean[:, :, None]
    chosen = QFilters(budget=5).choose(mx.array(keys), mx.array(queries), 0, 5)
    assert all(list(places) == [7, 17, 27, 37, 47] for row in chosen for places in row)


@pytest.fixture
def calibration(tmp_path: Path) -> str:
    """Return a file of the filters of layer 1: channel 3 of head 0, channel 5 of head 1."""
    u = np.zeros((KV, D), dtype=np.float32)
    u[0, 3] = u[1, 5] = 1
    file = tmp_path / "filters.safetensors"
    mx.save_safetensors(str(file), {"1.k.filter": mx.array(u)})
    return str(file)


def test_calibrated_filters_need_no_query(calibration: str) -> None:
    method = QFilters(budget=BUDGET, calibration=calibration)
    keys, _ = _data()
    cache = method.make_cache(1, 2)
    cache.update_and_fetch(mx.array(keys), mx.array(keys))
    saved = EvictingCache.from_state(cache.state)
    for one in (cache, saved):
        one.flush()
        places = np.array(one.kept.positions).reshape(B, KV, BUDGET)
        for b in range(B):
            assert list(places[b, 0]) == sorted(np.argsort(-keys[b, 0, :, 3])[:BUDGET])
            assert list(places[b, 1]) == sorted(np.argsort(-keys[b, 1, :, 5])[:BUDGET])
    plan = method.plan(2)
    assert plan[1]["calibration"].startswith("sha256:")
    assert calibration not in cache.state[1]
    with pytest.raises(ValueError, match=r"1\.k\.filter must be \[2, 8\], got \(2, 16\)"):
        method.choose(mx.array(keys[..., :8]), None, 1, BUDGET)


def test_fitted_filters_are_those_of_all_windows_queries() -> None:
    _, queries = _data(3)
    method = QFilters(calibration="auto")
    found = method.fit(0, 2, Seen(queries=mx.array(queries)), 0)
    assert found.keys() == {"k.filter"}
    both = np.concatenate([queries[0], queries[1]], axis=2)[None]
    expected = _oracle(np.concatenate([both, both]))[0]
    np.testing.assert_allclose(np.array(found["k.filter"]), expected, atol=1e-6)
    assert (method.fits(2), QFilters().fits(2)) == ({"k": {"method": "qfilters"}}, {})
    assert isinstance(method, Fitted)
    with pytest.raises(ValueError, match="by itself"):
        method.choose(mx.zeros((1, KV, N, D)), None, 0, BUDGET)
