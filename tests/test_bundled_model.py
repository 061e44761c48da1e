"""The protocols on the bundled model: what sees the cache, what must not, and equal schedules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evals.runner import Session
from evals.schema import Config, DatasetConfig, EvalConfig, ModelConfig, TrackingConfig
from gear.config import GearConfig
from gear.methods import METHODS

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("bundled")]


def _job(protocol: str, chunk: int | None = None) -> Config:
    return Config(
        model=ModelConfig(name="smollm2", source="smollm2"),
        dataset=DatasetConfig(name="embedded", source="embedded", limit=1),
        cache={"name": "gear", "_target_": METHODS["gear"], "settings": GearConfig()},
        eval=EvalConfig(
            name=protocol, protocol=protocol, prefill_tokens=200, scored_tokens=128, chunk=chunk
        ),
        tracking=TrackingConfig(name="none", enabled=False),
    )


@pytest.fixture(scope="module")
def metrics(smollm2: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Run the jobs once and return their metrics by a short name."""
    root = Path(tmp_path_factory.mktemp("mlruns"))
    jobs = {"decode": _job("decode"), "oneshot": _job("oneshot"), "single": _job("decode", chunk=1)}
    fp16 = replace(jobs["decode"], cache={"name": "fp16", "_target_": METHODS["fp16"]})
    fp16_oneshot = replace(jobs["oneshot"], cache=fp16.cache)
    dense = replace(jobs["decode"], eval=replace(jobs["decode"].eval, attention="dense"))
    jobs |= {"fp16": fp16, "fp16 oneshot": fp16_oneshot, "dense": dense}
    with Session(root, [], list(jobs.values())) as session:
        records = {name: session.run(job) for name, job in jobs.items()}
    assert {record["status"] for record in records.values()} == {"FINISHED"}, records
    return {name: record["metrics"] for name, record in records.items()}


def test_one_shot_gear_is_fp16_and_decode_is_not(metrics: dict[str, dict[str, float]]) -> None:
    exact = metrics["fp16 oneshot"]["quality/ppl_token/oneshot"]
    assert metrics["oneshot"]["quality/ppl_token/oneshot"] == pytest.approx(exact, rel=1e-4)
    assert metrics["decode"]["quality/ppl_token/decode"] > 1.01 * exact
    assert metrics["decode"]["fidelity/kl_mean"] > 0.01


def test_fp16_in_calls_is_fp16_in_one(metrics: dict[str, dict[str, float]]) -> None:
    exact = metrics["fp16 oneshot"]["quality/ppl_token/oneshot"]
    assert metrics["fp16"]["quality/ppl_token/decode"] == pytest.approx(exact, rel=1e-3)


def test_calls_of_a_block_equal_token_by_token(metrics: dict[str, dict[str, float]]) -> None:
    calls, single = metrics["decode"], metrics["single"]
    ppl = calls["quality/ppl_token/decode"]
    assert single["quality/ppl_token/decode-chunk1"] == pytest.approx(ppl, rel=0.01)
    assert abs(single["fidelity/delta_nll"] - calls["fidelity/delta_nll"]) < 0.01
    assert single["kv/stored_bytes"] == calls["kv/stored_bytes"]


def test_packed_attention_scores_as_reconstruction_does(
    metrics: dict[str, dict[str, float]],
) -> None:
    packed, dense = metrics["decode"], metrics["dense"]
    ppl = dense["quality/ppl_token/decode"]
    assert packed["quality/ppl_token/decode"] == pytest.approx(ppl, rel=1e-3)
    assert packed["fidelity/kl_mean"] == pytest.approx(dense["fidelity/kl_mean"], rel=0.01)
    assert packed["kv/stored_bytes"] == pytest.approx(dense["kv/stored_bytes"], rel=1e-3)


def test_the_default_preset_stores_a_quarter(metrics: dict[str, dict[str, float]]) -> None:
    decode = metrics["decode"]
    stored = decode["kv/accounted_bytes"] + decode["kv/buffer_bytes"]
    assert decode["kv/stored_bytes"] == stored
    assert decode["guard/tokens_compressed"] > 0
    assert decode["speed/decode_tok_per_s"] > 0
