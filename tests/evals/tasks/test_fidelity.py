"""KL, flips and NLL against an fp64 NumPy oracle, and KL 0 exactly where nothing changed."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from evals.tasks.fidelity import Comparison, Recorder, fidelity_metrics, kl_divergence

TARGETS = [3, 1, 4, 1, 5, 9]


def _log_probs(seed: int, tokens: int = 6, vocabulary: int = 40) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 3, (tokens, vocabulary))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _record(log_probs: np.ndarray) -> Recorder:
    recorder = Recorder(TARGETS)
    array = mx.array(log_probs.astype(np.float32))
    recorder(array[:4])
    recorder(array[4:])
    return recorder


def test_kl_against_the_oracle():
    p, q = _log_probs(0), _log_probs(1)
    stored = p.astype(np.float16)
    exact = stored.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    expected = (np.exp(exact) * (exact - q)).sum(-1)
    got = kl_divergence(mx.array(stored), mx.array(q.astype(np.float32)))
    np.testing.assert_allclose(np.array(got), expected, rtol=1e-5)
    unrounded = (np.exp(p) * (p - q)).sum(-1)
    np.testing.assert_allclose(np.array(got), unrounded, rtol=1e-2)


def test_kl_is_of_the_reference_from_the_method_not_the_reverse():
    p = np.log([[0.5, 0.5 - 1e-3, 1e-3]])
    q = np.log([[0.5, 1e-3, 0.5 - 1e-3]])
    p[0, 0], q[0, 0] = np.log(0.9), np.log(0.1)
    p -= np.log(np.exp(p).sum())
    q -= np.log(np.exp(q).sum())
    forward = (np.exp(p) * (p - q)).sum()
    reverse = (np.exp(q) * (q - p)).sum()
    assert abs(forward - reverse) > 0.1
    got = kl_divergence(mx.array(p.astype(np.float16)), mx.array(q.astype(np.float32))).item()
    assert got == pytest.approx(forward, rel=1e-2)


def test_kl_is_exactly_zero_only_where_the_rounded_values_agree():
    p = mx.array(_log_probs(0).astype(np.float32))
    stored = p.astype(mx.float16)
    assert kl_divergence(stored, p).tolist() == [0.0] * 6
    other = mx.array(_log_probs(1).astype(np.float32))
    mixed = mx.concatenate([p[:3], other[3:]])
    kl = kl_divergence(stored, mixed).tolist()
    assert kl[:3] == [0.0, 0.0, 0.0]
    assert min(kl[3:]) > 0


def test_impossible_and_broken_predictions_show():
    p = mx.array([[np.log(0.5), np.log(0.5), -np.inf]]).astype(mx.float16)
    finite = mx.array([[np.log(0.25), np.log(0.75), -np.inf]], dtype=mx.float32)
    expected = 0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)
    assert kl_divergence(p, finite).item() == pytest.approx(expected, rel=1e-2)
    excluded = mx.array([[0.0, -np.inf, -np.inf]], dtype=mx.float32)
    assert kl_divergence(p, excluded).item() == np.inf
    broken = mx.array([[np.nan, 0.0, 0.0]], dtype=mx.float32)
    assert np.isnan(kl_divergence(p, broken).item())


def test_recorder_keeps_what_it_read_in_order():
    log_probs = _log_probs(2)
    reference = _record(log_probs).reference()
    np.testing.assert_array_equal(np.array(reference.log_probs), log_probs.astype(np.float16))
    np.testing.assert_allclose(np.array(reference.nll), -log_probs[range(6), TARGETS], rtol=1e-6)
    assert reference.top1.tolist() == log_probs.argmax(-1).tolist()


def test_comparison_pairs_every_token_with_its_own_reference():
    p, q = _log_probs(2), _log_probs(3)
    q[1] = p[1]
    comparison = Comparison(TARGETS, _record(p).reference())
    array = mx.array(q.astype(np.float32))
    comparison(array[:1])
    comparison(array[1:])
    np.testing.assert_allclose(comparison.nll, -q[range(6), TARGETS], rtol=1e-6)
    np.testing.assert_allclose(comparison.kl, (np.exp(p) * (p - q)).sum(-1), rtol=2e-2)
    assert comparison.kl[1] == 0
    assert comparison.flips == (p.argmax(-1) != q.argmax(-1)).astype(int).tolist()
    assert sum(comparison.flips) > 0


def test_metrics_are_over_all_tokens_of_all_windows():
    samples = [
        {"kl": [0.1] * 99, "top1_flips": [0] * 99},
        {"kl": [5.0], "top1_flips": [1]},
    ]
    metrics = fidelity_metrics(samples)
    assert metrics["fidelity/kl_max"] == 5.0
    assert metrics["fidelity/kl_p99"] == pytest.approx(np.percentile([0.1] * 99 + [5.0], 99))
    assert metrics["fidelity/top1_flip_rate"] == pytest.approx(0.01)
