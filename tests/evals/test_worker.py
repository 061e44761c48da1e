"""The worker process itself, on the tiny model, over its real pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evals import compute
from evals import record as store
from evals.job import Job, build_job
from evals.worker_client import Worker
from tests.evals.configs import small


def ignore(event: dict[str, Any]) -> None:
    """Watch a job without looking."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def job_in(root: Path, *args: Any, **kwargs: Any) -> Job:
    return build_job(small(*args, **kwargs), root)


def test_the_protocol_on_its_pipes(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    store.record_dir(tmp_path, job.key).mkdir(parents=True)
    done = subprocess.Popen(
        [sys.executable, "-P", "-m", "evals.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[1])},
    )  # fmt: skip
    assert done.stdin is not None
    assert done.stdout is not None
    done.stdin.write(json.dumps({"run": job.spec}) + "\n")
    done.stdin.flush()
    events: list[dict[str, Any]] = []
    while not events or events[-1]["event"] != "done":
        events.append(json.loads(done.stdout.readline()))
    done.stdin.close()
    assert done.wait(10) == 0
    assert done.stdout.read() == ""
    done.stdout.close()
    progress = [(e["done"], e["total"], e["tokens"]) for e in events if e["event"] == "progress"]
    assert progress == [(1, 2, 192), (2, 2, 384)]
    assert [e["text"] for e in events if e["event"] == "log"] == [
        "BLAS: " + events[-1]["record"]["environment"]["blas"]
    ]
    assert events[-1]["record"]["status"] == "FINISHED"


def test_a_body_and_its_samples(tmp_path: Path, worker: Worker) -> None:
    job = job_in(tmp_path)
    body = worker.run(job.spec, ignore)
    assert body["status"] == "FINISHED", body
    samples = store.read_samples(store.record_dir(tmp_path, job.key) / "samples.jsonl")
    assert len(samples) == 2
    assert body["coverage"] == {"layers": 2, "covered_layers": 2, "packed_layers": 2}
    assert body["metrics"]["guard/tokens_compressed"] > 0
    layers = body["bytes"]["per_layer"]
    assert sum(layer["stored_bytes"] for layer in layers) == body["metrics"]["kv/stored_bytes"]
    assert sum(body["bytes"]["terms"].values()) == pytest.approx(body["metrics"]["kv/stored_bytes"])
    assert "BLAS" in (store.record_dir(tmp_path, job.key) / "log.txt").read_text()


def test_a_job_repeats_bit_by_bit_whatever_ran_before(tmp_path: Path, worker: Worker) -> None:
    job = job_in(tmp_path / "a")
    assert job.baseline is not None
    worker.run(job.baseline.spec, ignore)
    worker.run(job_in(tmp_path / "a", "kivi").spec, ignore)
    after_others = worker.run(job.spec, ignore)
    with Worker() as fresh:
        alone = fresh.run(job_in(tmp_path / "b").spec, ignore)
    assert after_others["status"] == "FINISHED"
    shared = {"key": job.key, "config": job.config}
    assert store.equal({**shared, **after_others}, {**shared, **alone})


def test_spilled_prefills_are_shared_and_gone_with_the_worker(tmp_path: Path) -> None:
    jobs = [job_in(tmp_path, "fp16"), *(job_in(tmp_path, bits=bits) for bits in (2, 4))]
    memory = {"prefill_memory_gib": 1e-6, "prefill_spill": True}
    with Worker() as worker:
        bodies = [worker.run({**job.spec, **memory}, ignore) for job in jobs]
        assert worker._scratch is not None
        scratch = Path(worker._scratch.name)
        assert len(list(scratch.iterdir())) == 2  # a prefill a window
    assert ["speed/prefill_tok_per_s" in body["metrics"] for body in bodies] == [True, False, False]
    assert not scratch.exists()


@pytest.mark.fault
def test_a_changed_text_fails_the_job(tmp_path: Path, worker: Worker) -> None:
    job = job_in(tmp_path)
    job.spec["dataset"]["limit"] = 1
    body = worker.run(job.spec, ignore)
    assert (body["status"], body["error"]["type"]) == ("FAILED", "DataError")
    assert "run the command again" in body["error"]["message"]
    assert "DataError" in body["error"]["log_tail"]


@pytest.mark.skipif(compute.mx.cuda.is_available(), reason="here the device is as asked")
def test_another_backend_fails_the_job(tmp_path: Path, worker: Worker) -> None:
    job = job_in(tmp_path)
    job.spec["config"]["backend"] = "cuda"
    body = worker.run(job.spec, ignore)
    assert (body["status"], body["error"]["type"]) == ("FAILED", "RuntimeError")
    assert "device='cuda'" in body["error"]["message"]


@pytest.mark.fault
def test_a_metric_that_is_not_finite_fails_the_job(tmp_path: Path) -> None:
    config = job_in(tmp_path, "fp16").config
    sample = {
        "nll": [1.0], "oneshot_nll": 1.0, "cache_classes": {"before": {}, "after": {}},
    }  # fmt: skip
    metrics = {"good": 1.0, "bad": float("nan"), "worse": float("inf")}
    body = compute._judged(config, [sample], {"metrics": metrics, "coverage": {}})
    assert (body["status"], body["metrics"]) == ("FAILED", {"good": 1.0})
    assert "bad, worse" in body["error"]["message"]
    assert body["guards"]["finite"].startswith("failed")


def test_the_worker_imports_neither_mlflow_nor_hydra(tmp_path: Path) -> None:
    code = (
        "import sys, evals.worker, evals.compute;"
        "print([m for m in ('mlflow', 'hydra', 'omegaconf') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    folder = Path(store.__file__).parents[1]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)  # noqa: S603
    assert out.stdout.strip() == "[]"
