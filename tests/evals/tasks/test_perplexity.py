"""Perplexity and fidelity of whole runs: names, values from the samples alone, the fp16 arm."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from evals.schema import EvalConfig
from evals.tasks.perplexity import Perplexity, protocol_name


def _run(ctx):
    samples = list(Perplexity().samples(ctx))
    return samples, Perplexity().metrics(samples, ctx)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "decode"),
        ({"chunk": 16}, "decode-chunk16"),
        ({"prefill": "streaming"}, "decode-streaming2048"),
        ({"prefill": "streaming", "chunk": 8, "prefill_chunk": 512}, "decode-chunk8-streaming512"),
        ({"protocol": "prefix"}, "prefix"),
        ({"protocol": "oneshot", "prefill": "streaming"}, "oneshot"),
    ],
)
def test_what_changes_the_number_is_in_its_name(settings, name):
    assert protocol_name(EvalConfig(name="x", **settings)) == name


def test_fp16_arm_reports_itself_and_checks_one_pass(make_context):
    ctx = make_context("fp16")
    samples, metrics = _run(ctx)
    assert ctx.model.calls == [96, 64, 160, 96, 64, 96, 64]  # one extra pass, over the first window
    for name in ("kl_mean", "kl_p99", "kl_max", "top1_flip_rate", "delta_nll", "kl_mean_high"):
        assert metrics[f"fidelity/{name}"] == 0
    assert metrics["kv/size_pct"] == 100
    assert metrics["guard/tokens_compressed"] == 0
    assert samples[0]["oneshot_nll"] == pytest.approx(np.mean(samples[0]["nll"]), rel=1e-4)
    assert "oneshot_nll" not in samples[1]
    assert "speed/compress_ms" not in metrics


def test_quality_is_computed_from_the_samples(make_context):
    ctx = make_context("gear")
    samples, metrics = _run(ctx)
    nll = np.concatenate([s["nll"] for s in samples])
    assert len(nll) == 3 * 64
    ppl = metrics["quality/ppl_token/decode"]
    assert ppl == pytest.approx(math.exp(nll.mean()))
    words, n_bytes = (sum(s[n] for s in samples) for n in ("n_words", "n_bytes"))
    assert n_bytes == 3 * 64  # a byte tokenizer
    assert metrics["quality/ppl_word/decode"] == pytest.approx(math.exp(nll.sum() / words))
    bits = metrics["quality/bits_per_byte/decode"]
    assert bits == pytest.approx(nll.sum() / math.log(2) / n_bytes)
    low, high = (metrics[f"quality/ppl_token/decode_{end}"] for end in ("low", "high"))
    assert low <= ppl <= high
    assert Perplexity().metrics(json.loads(json.dumps(samples)), ctx) == metrics


def test_gear_is_compared_with_the_stored_fp16_arm(make_context):
    exact, _ = _run(make_context("fp16"))
    ctx = make_context("gear")
    samples, metrics = _run(ctx)
    assert ctx.model.calls == 3 * [32, 32]  # prefills and references are reused
    assert "speed/prefill_tok_per_s" not in metrics
    assert [s["nll_fp16"] for s in samples] == [s["nll"] for s in exact]
    delta = np.mean([np.subtract(s["nll"], s["nll_fp16"]) for s in samples])
    assert metrics["fidelity/delta_nll"] == pytest.approx(delta, abs=1e-9)
    low, high = (metrics[f"fidelity/delta_nll_{end}"] for end in ("low", "high"))
    assert low <= delta <= high
    assert 0 < metrics["fidelity/kl_mean"] <= metrics["fidelity/kl_p99"]
    assert metrics["fidelity/kl_p99"] <= metrics["fidelity/kl_max"]
    assert 0 < metrics["fidelity/top1_flip_rate"] < 1


def test_a_missing_reference_is_computed_again_and_kept(make_context):
    _, stored = _run(make_context("fp16")), _run(make_context("gear"))[1]
    ctx = make_context("gear")
    ctx.logprobs.path("doc1", 0).unlink()
    _, metrics = _run(ctx)
    assert ctx.model.calls == [32, 32, 64, 32, 32, 32, 32]
    assert ctx.logprobs.get("doc1", 0) is not None
    measured = ("speed/", "mem/")
    kept = {name: value for name, value in metrics.items() if not name.startswith(measured)}
    assert kept == {n: v for n, v in stored.items() if not n.startswith(measured)}


def test_a_cache_that_does_nothing_has_kl_and_flips_exactly_zero(make_context):
    _run(make_context("fp16"))
    ctx = make_context("gear")
    ctx.method, ctx.make_caches = ctx.exact_method, ctx.make_exact_caches
    samples = list(Perplexity().samples(_as_gear(ctx)))
    metrics = Perplexity().metrics(samples, ctx)
    assert metrics["fidelity/kl_max"] == 0
    assert metrics["fidelity/top1_flip_rate"] == 0


def _as_gear(ctx):
    """Let the exact method pass for a compressing one, as a silent bypass would."""

    class Bypass(type(ctx.exact_method)):
        compresses = True

    ctx.method = Bypass()
    return ctx


def test_oneshot_is_blind_to_the_cache(make_context):
    _, exact = _run(make_context("fp16", protocol="oneshot"))
    _, gear = _run(make_context("gear", protocol="oneshot"))
    name = "quality/ppl_token/oneshot"
    assert gear[name] == pytest.approx(exact[name], rel=1e-4)
    assert gear["fidelity/kl_max"] == pytest.approx(0, abs=1e-6)
    assert gear["kv/size_pct"] < 100


def test_costs_are_sums_over_windows(make_context):
    ctx = make_context("gear")
    samples, metrics = _run(ctx)
    for kind in ("stored", "accounted", "buffer", "held", "fp16"):
        assert metrics[f"kv/{kind}_bytes"] == sum(s["kv"][f"{kind}_bytes"] for s in samples)
    assert metrics["kv/stored_bytes"] == metrics["kv/accounted_bytes"] + metrics["kv/buffer_bytes"]
    # 2 layers · 2 heads · 160 tokens · 2 · 32 channels · 2 bytes · 3 windows
    assert metrics["kv/fp16_bytes"] == 2 * 2 * 160 * 2 * 32 * 2 * 3
    assert metrics["kv/size_pct"] == 100 * metrics["kv/stored_bytes"] / metrics["kv/fp16_bytes"]
    terms = ("codes", "scales", "lowrank", "outliers")
    assert sum(metrics[f"kv/{t}_bytes"] for t in terms) == metrics["kv/accounted_bytes"]
    assert metrics["guard/tokens_compressed"] == 160
    assert metrics["speed/decode_tok_per_s"] > 0
    assert metrics["speed/compress_ms"] > 0
    assert metrics["mem/peak_bytes"] > metrics["kv/held_bytes"] / 3


def test_progress_counts_windows_and_tokens(make_context):
    ctx, seen = make_context("gear"), []
    ctx.progress = lambda *counts: seen.append(counts)
    _run(ctx)
    assert seen == [(1, 3, 160), (2, 3, 320), (3, 3, 480)]


def test_a_document_without_words_has_no_word_perplexity(make_context):
    ctx = make_context("fp16")
    samples, _ = _run(ctx)
    for sample in samples:
        sample["n_words"] = 0
    names = Perplexity().metrics(samples, ctx)
    assert not [name for name in names if "ppl_word" in name]
    assert "quality/ppl_token/decode" in names


def test_windows_of_one_document_are_one_unit_of_the_bootstrap(make_context):
    ctx = make_context("fp16")
    ctx.config["dataset"]["windows_per_document"] = 2
    ctx.documents = ctx.documents[:1]
    samples, metrics = _run(ctx)
    assert [(s["document"], s["window"]) for s in samples] == [("doc0", 0), ("doc0", 1)]
    assert "quality/ppl_token/decode" in metrics
    assert "quality/ppl_token/decode_low" not in metrics


def test_perplexity_beyond_a_float_is_infinite_not_an_error(make_context):
    ctx = make_context("fp16")
    samples, _ = _run(ctx)
    for sample in samples:
        sample["nll"] = [1e4] * 64
    assert Perplexity().metrics(samples, ctx)["quality/ppl_token/decode"] == math.inf
