"""Reconstruction error per layer and head, against NumPy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from evals.prefill import hand_over
from evals.tasks.reconstruction import Reconstruction, relative_error


def _run(ctx):
    samples = list(Reconstruction().samples(ctx))
    return samples, Reconstruction().metrics(samples, ctx)


def _context(make_context, method, gear=None, **settings):
    return make_context(method, gear, task="reconstruction", name="reconstruction", **settings)


def test_relative_error_is_frobenius_by_head():
    rng = np.random.default_rng(0)
    exact, noise = rng.normal(size=(1, 3, 20, 8)), 0.1 * rng.normal(size=(1, 3, 20, 8))
    noise[0, 1] = 0
    got = relative_error(mx.array(exact), mx.array(exact + noise))
    expected = [np.linalg.norm(noise[0, h]) / np.linalg.norm(exact[0, h]) for h in range(3)]
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    assert relative_error(mx.zeros((1, 1, 4, 4)), mx.zeros((1, 1, 4, 4))) == [0.0]
    assert relative_error(mx.zeros((1, 1, 4, 4)), mx.ones((1, 1, 4, 4))) == [np.inf]


def test_fp16_has_no_error(make_context):
    _, metrics = _run(_context(make_context, "fp16"))
    assert metrics["reconstruction/k_rel_err"] == 0
    assert metrics["reconstruction/v_rel_err"] == 0


def test_each_term_of_gear_lowers_the_error(make_context):
    errors = {
        method: _run(_context(make_context, method))[1] for method in ("kivi", "gear_l", "gear")
    }
    for side in ("k", "v"):
        kivi, gear_l, gear = (errors[m][f"reconstruction/{side}_rel_err"] for m in errors)
        assert 0 < gear < gear_l < kivi < 1


def test_samples_hold_every_layer_and_head(make_context):
    ctx = _context(make_context, "gear")
    samples, metrics = _run(ctx)
    assert ctx.model.calls == [96, 96, 96]  # nothing is scored
    for sample in samples:
        assert [layer["layer"] for layer in sample["layers"]] == [0, 1]
        assert all(len(layer[f"{s}_rel_err"]) == 2 for layer in sample["layers"] for s in "kv")
        assert sample["kv"]["tokens_compressed_min"] == 96
    state, _ = ctx.prefills.prefill(ctx.model, ctx.windows[0].prefill, ctx.eval.prefill_chunk)
    caches = ctx.make_caches()
    hand_over(state, caches)
    exact, rebuilt = state.layers[1].keys_and_values()[1], caches.layers[1].reconstruct()[1]
    expected = np.linalg.norm(np.array(exact - rebuilt)[0, 1]) / np.linalg.norm(
        np.array(exact)[0, 1]
    )
    assert samples[0]["layers"][1]["v_rel_err"][1] == pytest.approx(expected, rel=1e-4)
    mean = np.mean([layer["k_rel_err"] for s in samples for layer in s["layers"]])
    assert metrics["reconstruction/k_rel_err"] == pytest.approx(mean)
    assert metrics["kv/size_pct"] < 100
    assert metrics["speed/compress_ms"] > 0
    assert metrics["speed/prefill_tok_per_s"] > 0
    assert "speed/decode_tok_per_s" not in metrics
    assert not [name for name in metrics if name.startswith(("quality/", "fidelity/"))]
