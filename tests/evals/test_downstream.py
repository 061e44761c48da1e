"""Downstream runs on the tiny model: each kind of request, fp16 compared, resume, rescoring."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import mlx.core as mx
import pytest

from evals import compute as computing
from evals import record as store
from evals import rescore
from evals.items import Item, Items
from evals.job import Job, build_job
from evals.questions import Question
from evals.record import FINISHED, SAMPLES, read_samples, record_dir
from evals.schema import Config, DatasetConfig
from gear.cache import GearCache
from tests.evals.configs import small

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3
KINDS = ("choices", "one token", "generate", "rolling")


class Asks:
    """Questions of one kind over one text; the answer is right where it is the first choice."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def question(self, item: Item) -> Question:
        text = TEXT[: 160 + 7 * item.index]
        if self.kind == "choices":
            return Question(pairs=[(text, " wisdom"), (text, " folly")])
        if self.kind == "one token":
            return Question(pairs=[(text, letter) for letter in "abcd"])
        if self.kind == "generate":
            return Question(text=text, until=("\n",), max_new=12)
        return Question(text=text, rolling=True)

    def scores(self, item: Item, responses: Sequence[Any]) -> tuple[dict[str, Any], dict]:
        if self.kind == "rolling":
            return {"nats": responses[0]}, {}
        if self.kind == "generate":
            return {"acc": float(len(responses[0]) % 2)}, {"all": responses[0]}
        values = [loglikelihood for loglikelihood, _ in responses]
        return {"acc": float(values[0] == max(values))}, {}

    def aggregate(self, task: str, metric: str) -> Any:
        return mean


def items(count: int = 3) -> Items:
    scored = [Item(f"asks-{i}", "asks", i, {"text": i}) for i in range(count)]
    return Items(scored, {}, 2 * count)


def config(cache: str = "gear", **settings: Any) -> Config:
    """Return a downstream job of the tiny model; what it asks is put in by `asking`."""
    job = small(cache)
    job.dataset = DatasetConfig(
        name="asks", source="generated", task="passkey", metric=None, lengths=[512], depths=[0.5]
    )
    job.eval.name = job.eval.task = "downstream"
    for name, value in settings.items():
        setattr(job.eval, name, value)
    return job


@pytest.fixture(params=KINDS)
def asking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put questions of one kind in place of the dataset's."""
    ask(monkeypatch, request.param)
    return request.param


def ask(monkeypatch: pytest.MonkeyPatch, kind: str, count: int = 3) -> None:
    monkeypatch.setattr(computing, "asked", lambda *_: (items(count), Asks(kind)))


def computed(job: Job) -> dict[str, Any]:
    """Compute a job as the worker does, and commit it as the parent does."""
    body = computing.compute(job.spec, lambda *_: None)
    record = {"key": job.key, "config": job.config, **body}
    record |= {"started": "", "finished": "", "mlflow_run_id": None}
    store.commit(Path(job.spec["root"]), job.key, record)
    return record


def both(root: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the records of the fp16 arm and of gear."""
    exact, job = behind_fp16(root, **settings)
    return exact, computed(job)


def behind_fp16(root: Path, **settings: Any) -> tuple[dict[str, Any], Job]:
    """Return the record of the fp16 arm, computed, and gear's job."""
    job = build_job(config(**settings), root)
    assert job.baseline is not None
    return computed(job.baseline), job


def test_each_kind_is_scored_compared_and_guarded(asking: str, tmp_path: Path) -> None:
    exact, record = both(tmp_path)
    assert exact["status"] == record["status"] == FINISHED, record.get("error")
    metrics = record["metrics"]
    name = "quality/nats/asks" if asking == "rolling" else "quality/acc/asks"
    assert {name, f"{name}_low", f"{name}_high"} <= metrics.keys()
    assert metrics["data/items"] == 3
    assert metrics["data/items_total"] == 6
    assert metrics["coverage/context_compressed"] > 0.5
    assert "fidelity/delta_acc" in metrics
    assert not any(n.startswith("fidelity") for n in exact["metrics"])
    assert record["guards"]["differs_from_fp16"] == "passed"
    if asking != "rolling":
        assert exact["guards"]["calls_match_oneshot"] == "passed"
    samples = read_samples(record_dir(tmp_path, record["key"]) / SAMPLES)
    assert [sample["id"] for sample in samples] == ["asks-0", "asks-1", "asks-2"]


class Bypass(GearCache):
    """A cache that counts what GEAR would store and gives attention exact K and V."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        super().update_and_fetch(keys, values)
        old = getattr(self, "_all", None)
        new = (keys, values)
        joined = (
            new if old is None else tuple(mx.concatenate(p, 2) for p in zip(old, new, strict=True))
        )
        self._all = joined
        return joined


@pytest.mark.fault
def test_a_cache_that_falls_back_to_exact_is_caught(
    asking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, job = behind_fp16(tmp_path)
    monkeypatch.setattr("gear.methods.family.GearCache", Bypass, raising=False)
    monkeypatch.setattr("gear.cache.GearCache", Bypass)
    record = computed(job)
    assert record["status"] == "FAILED"
    assert "differs_from_fp16" in record["error"]["message"]


@pytest.mark.fault
def test_a_cache_that_never_compresses_is_caught(
    asking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, job = behind_fp16(tmp_path)
    monkeypatch.setattr(GearCache, "flush", lambda self: None)
    record = computed(job)
    assert record["status"] == "FAILED"
    assert "tokens_compressed: failed: a layer ended" in record["error"]["message"]


def test_one_token_choices_see_the_compressed_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, "one token")
    exact, record = (read_samples(record_dir(tmp_path, r["key"]) / SAMPLES) for r in both(tmp_path))
    for a, b in zip(exact, record, strict=True):
        assert len(a["loglikelihoods"]) == 4
        assert all(x != y for x, y in zip(a["loglikelihoods"], b["loglikelihoods"], strict=True))


@pytest.mark.fault
@pytest.mark.parametrize("size", [1, 2])
def test_a_killed_run_goes_on_behind_its_last_whole_batch(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, "generate", 5)
    job = build_job(config(batch_size=size), tmp_path).baseline
    assert job is not None
    whole = computed(job)
    folder = record_dir(tmp_path, job.key)
    lines = (folder / SAMPLES).read_text().splitlines(keepends=True)
    (folder / "record.json").unlink()
    first = json.loads(lines[0]) | {"stopped": "was kept"}
    third = json.loads(lines[2]) | {"stopped": "was kept"}
    left = json.dumps(first) + "\n" + lines[1] + json.dumps(third) + "\n" + lines[3][:40]
    (folder / SAMPLES).write_text(left)
    again = computed(job)
    samples = read_samples(folder / SAMPLES)
    assert [s["id"] for s in samples] == [f"asks-{i}" for i in range(5)]
    assert samples[0]["stopped"] == "was kept"
    assert (samples[2]["stopped"] == "was kept") == (size == 1)  # half of a batch of two
    assert store.equal(whole, again)


def test_a_run_that_failed_by_itself_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, "choices")
    job = build_job(config(), tmp_path).baseline
    assert job is not None
    record = computed(job)
    path = record_dir(tmp_path, job.key) / SAMPLES
    stale = [{**sample, "scores": {"acc": 9.0}} for sample in read_samples(path)]
    path.write_text("".join(json.dumps(sample) + "\n" for sample in stale))
    failure = store.failure("ValueError", "a task with a bug")
    store.commit(tmp_path, job.key, {**record, **failure})
    assert computed(job)["metrics"]["quality/acc/asks"] <= 1
    killed = store.failure("WorkerKilled", "the worker was ended", signal="SIGKILL")
    path.write_text("".join(json.dumps(sample) + "\n" for sample in stale))
    store.commit(tmp_path, job.key, {**record, **killed})
    assert computed(job)["metrics"]["quality/acc/asks"] == 9


def test_batches_answer_as_one_at_a_time_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, "generate", 5)
    answers = []
    for size in (1, 4):
        _, record = both(tmp_path, batch_size=size)
        samples = read_samples(record_dir(tmp_path, record["key"]) / SAMPLES)
        answers.append([sample["token_ids"] for sample in samples])
        assert record["config"]["eval"]["batch_size"] == size
    assert answers[0] == answers[1]


def test_rescoring_reads_the_stored_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(monkeypatch, "generate")
    monkeypatch.setattr(rescore, "_questions", lambda *_: (items(), Asks("generate")))
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path))
    _, record = both(tmp_path)
    assert rescore.main([]) == 0  # nothing has changed
    path = record_dir(tmp_path, record["key"]) / SAMPLES
    samples = read_samples(path)
    truth = [sample["scores"]["acc"] for sample in samples]
    wrong = [{**s, "scores": {"acc": 1 - s["scores"]["acc"]}} for s in samples]
    path.write_text("".join(json.dumps(sample) + "\n" for sample in wrong))
    bad = copy.deepcopy(record)
    bad["metrics"]["quality/acc/asks"] = 1 - record["metrics"]["quality/acc/asks"]
    store.commit(tmp_path, record["key"], bad)
    assert rescore.main([record["key"][:8]]) == 1
    assert "quality/acc/asks" in capsys.readouterr().out
    assert rescore.main(["--write"]) == 0
    assert [sample["scores"]["acc"] for sample in read_samples(path)] == truth
    loaded = store.load(tmp_path, record["key"])
    assert loaded is not None
    assert loaded["metrics"] == record["metrics"]


def test_a_long_context_takes_no_plain_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, "choices")
    monkeypatch.setattr("evals.tasks.downstream._LONGEST_PASS", 100)
    exact, _ = both(tmp_path)
    assert exact["guards"]["calls_match_oneshot"] == "not_applicable"


def test_the_key_holds_what_a_downstream_job_reads(tmp_path: Path) -> None:
    key = build_job(config(), tmp_path).key
    for name, value in {"batch_size": 2, "max_new_tokens": 5, "chat_template": True}.items():
        assert build_job(config(**{name: value}), tmp_path).key != key
    assert build_job(config(scored_tokens=5, protocol="prefix"), tmp_path).key == key
    text = small()
    before = build_job(text, tmp_path).key
    text.eval.batch_size = 7
    text.dataset.per_cell = 3
    assert build_job(text, tmp_path).key == before
