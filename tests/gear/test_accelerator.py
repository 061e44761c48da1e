"""The hot path on Metal or CUDA: prefill, compression and decoding, nothing on a CPU stream.

An operation leaves the accelerator where it is given a CPU stream, and linear algebra has no other
there. Here both are refused, so whatever tries either fails; on a CPU the file is skipped.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import gear
from gear import GearConfig, decode_kernel
from gear.generation import fresh_caches
from gear.methods import METHODS, load_method
from gear.methods.gear import Gear
from gear.placement import on_cpu
from tests.gear.calibrated import calibration_file, needs_file
from tests.gear.tiny_models import build

pytestmark = pytest.mark.skipif(on_cpu(), reason="needs an accelerator")

CALLS = [200, 130, *[1] * 70]  # a prefill block, a chunk that sees them, a decode block
TOLERANCE = 0.02  # fp16 logits, relative to their norm


class _RefusedStream:
    """What stands for `mx.cpu`: nothing takes it for a device or a stream."""


def _refused(*_: Any, **__: Any) -> None:
    raise AssertionError("linear algebra runs on a CPU stream only")


def _logits(model: Any, caches: list[Any]) -> np.ndarray:
    """Return the logits [tokens, vocabulary] of CALLS, evaluated call by call."""
    tokens = mx.arange(sum(CALLS))[None] * 7 % 257
    found, start = [], 0
    for n in CALLS:
        found.append(model(tokens[:, start : start + n], cache=caches)[0].astype(mx.float32))
        mx.eval(found[-1], [cache.state for cache in caches])
        start += n
    return np.array(mx.concatenate(found))


@pytest.mark.parametrize(
    ("config", "by_kernel"),
    [
        (GearConfig(), True),
        (GearConfig(sparse_frac=0.0), True),
        (GearConfig(factor_bits=4, scale_bits=8, n_sink=4), False),  # tiles
    ],
    ids=["gear_2bit", "no outliers", "frontier terms"],
)
def test_no_operation_on_a_cpu_stream(
    config: GearConfig, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    model.set_dtype(mx.float16)
    method = Gear(config)
    expected = _logits(model, fresh_caches(model, method))  # reconstructs K and V
    calls = 0
    partial = decode_kernel.partial

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return partial(*arguments)

    monkeypatch.setattr(decode_kernel, "partial", counted)
    monkeypatch.setattr(mx, "cpu", _RefusedStream())
    for name in ("svd", "qr", "eigh", "eig", "inv", "cholesky"):
        monkeypatch.setattr(mx.linalg, name, _refused)
    with gear.compressed(model, method):
        caches = make_prompt_cache(model)
        found = _logits(model, caches)
    assert all(cache.tokens_compressed > 300 for cache in caches)
    assert (calls > 0) == by_kernel
    distance = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert distance < TOLERANCE


def test_the_refusals_are_felt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "cpu", _RefusedStream())
    with pytest.raises(TypeError):
        mx.eval(mx.add(mx.ones(3), 1, stream=mx.cpu))


def _errors(name: str) -> list[float]:
    """Return the relative errors of K and V of 300 tokens, on the default device."""
    cls = load_method(METHODS[name])
    options = {"calibration": calibration_file(name)} if needs_file(name) else {}
    settings = {"settings": GearConfig()} if cls.uses_gear else {}
    cache = cls(**options, **settings).make_cache(0, 2)
    exact = [mx.random.normal((1, 2, 300, 64), key=mx.random.key(seed)) for seed in (1, 2)]
    if getattr(cache, "query_window", 0):
        cache.observe(mx.random.normal((1, 4, 300, 64), key=mx.random.key(3)))
    cache.update_and_fetch(*exact)
    cache.flush()
    both = zip(cache.reconstruct(), exact, strict=True)
    return [(mx.linalg.norm(a - x) / mx.linalg.norm(x)).item() for a, x in both]  # type: ignore[misc]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "fp16"])
def test_every_method_is_as_good_as_on_a_cpu(name: str) -> None:
    """Of noise a low rank is not unique, so errors are compared and not values."""
    accelerator = mx.default_device()
    mx.set_default_device(mx.cpu)  # pyright: ignore[reportArgumentType]
    try:
        expected = _errors(name)
    finally:
        mx.set_default_device(accelerator)
    assert _errors(name) == pytest.approx(expected, rel=0.03)
