"""Guards: each one passes, fails with a reason, and is not applicable where it should be."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys

import pytest

from evals.guards import check, failures

CONFIG = {
    "cache": {"name": "gear", "layers": [{"attend": "exact", "allow_larger_than_fp16": False}]},
    "eval": {"task": "perplexity", "protocol": "decode", "allow_uncompressed": False},
    "dtype": "float32",
}
SAMPLES = [
    {
        "document": "doc",
        "window": 0,
        "nll": [2.0, 4.0],
        "kv": {"tokens_compressed_min": 64},
        "cache_classes": {"before": {"GearCache": 2}, "after": {"GearCache": 2}},
    }
]
METRICS = {
    "kv/stored_bytes": 30.0,
    "kv/fp16_bytes": 100.0,
    "fidelity/kl_max": 0.1,
    "fidelity/top1_flip_rate": 0.0,
}
COVERAGE = {"layers": 2, "covered_layers": 2}


def _check(config=None, sample=None, metrics=None, coverage=None) -> dict[str, str]:
    merged = copy.deepcopy(CONFIG)
    for group, change in (config or {}).items():
        merged[group] = {**merged[group], **change} if isinstance(change, dict) else change
    samples = [*SAMPLES, {**SAMPLES[0], **(sample or {})}]
    if "oneshot_nll" in (sample or {}):
        samples = samples[1:]
    return check(merged, samples, {**METRICS, **(metrics or {})}, coverage or COVERAGE)


FP16 = {"cache": {"name": "fp16", "layers": []}}
ONESHOT = {"eval": {"protocol": "oneshot"}}


def test_a_good_run_passes():
    guards = _check()
    assert guards == {
        "tokens_compressed": "passed",
        "context_compressed": "not_applicable",
        "cache_class": "passed",
        "below_fp16": "passed",
        "differs_from_fp16": "passed",
        "calls_match_oneshot": "not_applicable",
        "finite": "passed",
    }
    assert failures(guards) == []


@pytest.mark.fault
@pytest.mark.parametrize(
    ("guard", "changes", "why"),
    [
        ("tokens_compressed", {"sample": {"kv": {"tokens_compressed_min": 0}}}, "0 tokens"),
        ("tokens_compressed", {"coverage": {"layers": 2, "covered_layers": 0}}, "no layer"),
        (
            "cache_class",
            {"sample": {"cache_classes": {"before": {"GearCache": 2}, "after": {"KVCache": 2}}}},
            "GearCache.*KVCache",
        ),
        ("below_fp16", {"metrics": {"kv/stored_bytes": 100.0}}, "100 bytes stored"),
        ("differs_from_fp16", {"metrics": {"fidelity/kl_max": 0.0}}, "exactly 0"),
        ("calls_match_oneshot", {"config": FP16, "sample": {"oneshot_nll": 3.0011}}, "0.0011"),
        ("calls_match_oneshot", {"config": FP16, "sample": {"oneshot_nll": 2.9989}}, "0.0011"),
        ("calls_match_oneshot", {"config": FP16, "sample": {"oneshot_nll": math.nan}}, "nan"),
        ("finite", {"metrics": {"quality/ppl_token/decode": math.inf}}, "ppl_token"),
        ("finite", {"metrics": {"speed/x": math.nan, "mem/y": 1.0}}, "speed/x$"),
    ],
)
def test_each_guard_fails_alone_and_says_why(guard, changes, why):
    guards = _check(**changes)
    (failed,) = failures(guards)
    assert failed.startswith(f"{guard}: failed: ")
    assert re.search(why, failed)


TASK = {"eval": {"task": "downstream", "allow_uncompressed": False}}
ASKED = {"coverage/context_compressed": 0.75, "fidelity/loglikelihood_diff_max": 0.1}


def test_a_short_item_may_be_uncompressed_but_not_most_of_the_context():
    short = {"kv": {"tokens_compressed_min": 0}}
    guards = _check(TASK, short, ASKED)
    assert guards["tokens_compressed"] == guards["context_compressed"] == "passed"
    little = {**ASKED, "coverage/context_compressed": 0.49}
    failed = _check(TASK, short, little)["context_compressed"]
    assert failed.startswith("failed: 49% of the context tokens")
    allowed = {"eval": {**TASK["eval"], "allow_uncompressed": True}}
    assert _check(allowed, short, little)["context_compressed"] == "not_applicable"
    assert _check({**TASK, **FP16}, short, little)["context_compressed"] == "not_applicable"


def test_answers_that_all_equal_fp16s_saw_no_compressed_cache():
    same = {**ASKED, "fidelity/loglikelihood_diff_max": 0.0}
    assert _check(TASK, {}, same)["differs_from_fp16"].startswith("failed")
    assert _check(TASK, {}, ASKED)["differs_from_fp16"] == "passed"
    other_texts = {"coverage/context_compressed": 0.75}
    assert _check(TASK, {}, other_texts)["differs_from_fp16"] == "passed"


@pytest.mark.parametrize("config", [FP16, ONESHOT])
def test_compression_guards_do_not_apply_to_fp16_and_exact_oneshot(config):
    guards = _check(
        config,
        {"kv": {"tokens_compressed_min": 0}},
        {"kv/stored_bytes": 100.0, "fidelity/kl_max": 0.0},
    )
    for name in ("tokens_compressed", "below_fp16", "differs_from_fp16"):
        assert guards[name] == "not_applicable"
    assert guards["finite"] == guards["cache_class"] == "passed"


@pytest.mark.parametrize("layer", [{"attend": "compressed"}, {"bits": 4, "group_size": 64}])
def test_oneshot_is_guarded_where_a_pass_sees_its_own_compressed_tokens(layer):
    config = {**ONESHOT, "cache": {"layers": [layer]}}
    guards = _check(config, {}, {"fidelity/kl_max": 0.0})
    assert guards["tokens_compressed"] == "passed"
    assert guards["differs_from_fp16"].startswith("failed")


def test_a_flip_or_a_kl_is_difference_enough():
    flips = {"fidelity/kl_max": 0.0, "fidelity/top1_flip_rate": 0.01}
    assert _check(metrics=flips)["differs_from_fp16"] == "passed"


def test_reconstruction_has_no_predictions_to_compare():
    config = {"eval": {"task": "reconstruction", "protocol": "decode"}}
    assert _check(config)["differs_from_fp16"] == "not_applicable"
    missing = _check(config, {"kv": {"tokens_compressed_min": 0}})
    assert missing["tokens_compressed"].startswith("failed")


@pytest.mark.parametrize(
    "config",
    [
        {"eval": {"allow_uncompressed": True}},
        {"cache": {"layers": [{"attend": "exact", "allow_larger_than_fp16": True}]}},
    ],
)
def test_bytes_above_fp16_pass_only_where_allowed(config):
    larger = {"kv/stored_bytes": 140.0}
    assert _check(metrics=larger)["below_fp16"].startswith("failed")
    assert _check(config, {}, larger)["below_fp16"] == "not_applicable"


def test_allow_uncompressed_excuses_missing_compression_only():
    allowed = {"eval": {"allow_uncompressed": True}}
    nothing = {"kv": {"tokens_compressed_min": 0}}
    assert _check(allowed, nothing)["tokens_compressed"] == "not_applicable"
    assert _check(allowed)["tokens_compressed"] == "passed"
    assert _check(allowed, nothing, {"fidelity/kl_max": math.nan})["finite"].startswith("failed")


def test_half_precision_has_the_wider_bound():
    sample = {"oneshot_nll": 3.005}
    assert _check(FP16, sample)["calls_match_oneshot"].startswith("failed")
    assert _check({**FP16, "dtype": "float16"}, sample)["calls_match_oneshot"] == "passed"
    wide = {"oneshot_nll": 3.02}
    assert _check({**FP16, "dtype": "bfloat16"}, wide)["calls_match_oneshot"].startswith("failed")


def test_guards_load_no_mlx():
    code = "import sys, evals.guards; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603
