"""K and V that no model should make, and long decoding, through every method.

One option of conf/cache for each method; those that need a fitted file are left to conformance.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from evals.caches import Caches
from gear import NonFiniteError
from gear.bases import BASES
from gear.methods import METHODS
from tests.conformance.test_caches import caches_of, fill, kv, method_of
from tests.gear.calibrated import needs_file

pytestmark = pytest.mark.fault
FITTED = [name for name in METHODS if name in BASES and needs_file(name)]
NAMES = sorted(set(METHODS) - set(FITTED))
TOKENS = 128


def filled_with(name: str, value: float, dtype: mx.Dtype) -> Caches:
    """Return caches behind a prefill in which one entry of K and one of V is ``value``."""
    caches = caches_of(name)
    keys, values = kv(TOKENS, dtype)
    keys[0, 0, 70, 3], values[0, 1, 71, 5] = value, value
    for layer in caches.layers:
        if getattr(layer, "query_window", 0):
            layer.observe(mx.random.normal((1, 4, TOKENS, 64), key=mx.random.key(3)))
        layer.update_and_fetch(keys, values)
    caches.flush()
    return caches


def finite(caches: Caches) -> list[bool]:
    """Tell of K and V whether what is read back is finite throughout."""
    return [bool(mx.isfinite(x).all()) for x in caches.layers[0].reconstruct()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [60000.0, -60000.0, 1e-40, 6e-8])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_large_and_subnormal_values_are_read_back_finite(
    name: str, value: float, dtype: mx.Dtype
) -> None:
    assert finite(filled_with(name, value, dtype)) == [True, True]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused_or_stay(name: str, value: float) -> None:
    """What stays makes the metrics NaN, which fails the run; a number in its place would not."""
    try:
        caches = filled_with(name, value, mx.float32)
    except NonFiniteError:
        return
    assert finite(caches) == [False, False]


@pytest.mark.parametrize("name", NAMES)
def test_300_decoded_tokens_take_more_bytes_and_not_too_many(name: str) -> None:
    caches = fill(caches_of(name), TOKENS)
    layer, (keys, values), sizes = caches.layers[0], kv(300), []
    for i in range(300):
        layer.update_and_fetch(keys[:, :, i : i + 1], values[:, :, i : i + 1])
        sizes.append(layer.cache_bytes())
    accounted = [size.accounted for size in sizes]
    assert accounted == sorted(accounted)
    assert all(size.stored <= size.fp16 for size in sizes)
    if BASES.get(name) is not None or method_of(name).uses_gear:
        assert max(size.buffer for size in sizes) <= 2 * 2 * 2 * 64 * 260
        assert sizes[-1].stored < 0.7 * sizes[-1].fp16
