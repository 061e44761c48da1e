"""What a job needs at least, against what it really holds; and the refusal with its numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from evals import models, preflight
from evals.job import build_job
from evals.runner import Session
from evals.schema import ModelConfig
from tests.evals.configs import small

GIB = 2**30
LARGE = ModelConfig(name="tiny", source="tiny", layers=80, heads=64, kv_heads=64, head_dim=128)


def test_the_weights_are_those_of_the_model(tmp_path: Path) -> None:
    from mlx.utils import tree_flatten

    job = build_job(small(), tmp_path)
    model, _ = models.load(job.spec["model"], "float32")
    held = sum(p.nbytes for _, p in tree_flatten(model.parameters()))
    assert preflight.needs(job.spec).weights == held


def test_k_and_v_and_log_probabilities_by_hand(tmp_path: Path) -> None:
    job = build_job(small(), tmp_path)
    model = job.config["model"]
    found = preflight.needs(job.spec)
    per_token = 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * 4
    assert found.kv == (128 + 64) * per_token
    assert found.log_probs == 64 * model["vocab_size"] * 6
    downstream = {"task": "downstream", "batch_size": 3}
    config = {**job.config, "eval": downstream, "dataset": {"lengths": [500, 1000]}}
    found = preflight.needs({**job.spec, "config": config})
    assert (found.kv, found.log_probs) == (3 * 1000 * per_token, 0)


@pytest.mark.fault
@pytest.mark.parametrize("gib", [0.001, None])
def test_what_cannot_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, gib: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gib is None:
        memory = SimpleNamespace(total=GIB // 1000)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    config = small("fp16")
    config = replace(config, job=replace(config.job, memory_limit_gib=gib))
    with Session(tmp_path, [], [config]) as session:
        monkeypatch.setattr(session._worker, "run", lambda *_: pytest.fail("was started"))
        record = session.run(config)
    assert (record["status"], record["error"]["type"]) == ("FAILED", "TooLarge")
    name = "job.memory_limit_gib=0.001" if gib else "this machine's memory="
    assert name in record["error"]["message"]
    assert "of weights" in record["error"]["message"]
    assert "Next step: a smaller or quantized model" in record["error"]["message"]


def test_what_is_done_is_not_refused_afterwards(tmp_path: Path) -> None:
    config = small("fp16")
    with Session(tmp_path, [], [config]) as session:
        assert session.run(config)["status"] == "FINISHED"
    tight = replace(config, job=replace(config.job, memory_limit_gib=0.001))
    with Session(tmp_path, [], [tight]) as session:
        assert session.run(tight)["status"] == "FINISHED"


def test_a_cuda_devices_memory_is_not_guessed(tmp_path: Path) -> None:
    spec = build_job(replace(small(), model=LARGE), tmp_path).spec
    cuda = {**spec, "config": {**spec["config"], "backend": "cuda"}}
    assert preflight.refusal(cuda) is None
    assert preflight.refusal({**cuda, "memory_limit_gib": 1.0}) is not None
