"""Runs in MLflow: what they hold; nothing is logged twice; records alone rebuild them."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from evals import record as store
from evals.schema import TrackingConfig
from evals.tracking import SweepView, log_sweep, sync
from evals.tracking_store import TrackingError, artifacts_uri, prepare, store_uri
from gear.config import GearConfig
from tests.evals.fake_records import commit, failed, finished, on_disk, sweep

MLFLOW = TrackingConfig(name="mlflow")
ARGV = ["gear.rank=4,8", "-m"]


def client_of(root: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(store_uri(root, MLFLOW))


def runs_of(root: Path) -> dict[str, Any]:
    """Return every run by name."""
    client = client_of(root)
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    return {run.info.run_name: run for run in client.search_runs(ids)}


def files_of(run: Any) -> dict[str, bytes]:
    """Return a run's artifacts by name."""
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict], SweepView]:
    """One sweep of an fp16 arm, GEAR at two ranks and a job that died, in a fresh store."""
    root = tmp_path_factory.mktemp("root")
    records = commit(root, [*sweep(), failed(settings=GearConfig(rank=16))])
    return root, records, log_sweep(root, records, ARGV, MLFLOW)


@pytest.fixture
def root(logged: tuple[Path, list[dict], SweepView], tmp_path: Path) -> Path:
    """A copy of that results root, which a test may change."""
    from mlflow.tracking._tracking_service import utils

    utils._artifact_repos_cache.clear()  # by run id, and every copy has the same ones
    shutil.copytree(logged[0], tmp_path / "copy")
    prepare(tmp_path / "copy" / "mlflow.db", artifacts_uri(tmp_path / "copy"))
    return tmp_path / "copy"


def test_one_parent_and_a_child_for_each_record(logged: Any) -> None:
    root, records, view = logged
    runs = {run.info.run_id: run for run in runs_of(root).values()}
    assert set(runs) == {view.parent_run_id, *view.run_ids.values()}
    assert set(view.run_ids) == {record["key"] for record in records}
    for key, run_id in view.run_ids.items():
        tags = runs[run_id].data.tags
        assert tags["mlflow.parentRunId"] == tags["gear.parent"] == view.parent_run_id
        assert tags["gear.key"] == key
        assert tags["gear.reused"] == "false"
        assert (tags["gear.model"], tags["gear.dataset"], tags["gear.eval"]) == (
            "tiny",
            "embedded",
            "decode",
        )
        assert tags["gear.jobset"] == runs[view.parent_run_id].data.tags["gear.jobset"]


def test_records_get_their_run_ids(logged: Any) -> None:
    root, records, view = logged
    ids = {record["key"]: on_disk(root, record)["mlflow_run_id"] for record in records}
    assert ids == view.run_ids


def test_a_child_shows_its_record(logged: Any) -> None:
    root, records, _ = logged
    run = runs_of(root)["gear (gear.rank=8)"]
    assert run.data.metrics == records[2]["metrics"]
    assert run.data.params["gear.rank"] == "8"
    assert run.data.params["cache.name"] == "gear"
    assert run.data.params["model.name"] == "tiny"
    assert run.info.status == "FINISHED"
    assert run.info.end_time - run.info.start_time == 20_000
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("embedded", "cd" * 6)
    assert dataset.dataset.source_type == "embedded"


def test_a_childs_files(logged: Any) -> None:
    root, records, _ = logged
    files = files_of(runs_of(root)["gear (gear.rank=8)"])
    assert set(files) == {
        "config.yaml", "record.json", "environment.json", "samples.jsonl", "log.txt",
        "samples.json", "layers.json", "layers.png", "layers.csv",
    }  # fmt: skip
    assert json.loads(files["record.json"]) == records[2]
    assert b"rank: 8" in files["config.yaml"]


def test_a_failed_job_is_a_failed_run(logged: Any) -> None:
    root, _, view = logged
    runs = runs_of(root)
    run = runs["gear (gear.rank=16)"]
    assert run.info.status == "FAILED"
    assert run.data.tags["gear.error"].startswith("WorkerDied (SIGSEGV)")
    assert client_of(root).get_run(view.parent_run_id).info.status == "FAILED"


def test_the_parent_shows_the_table_and_the_command(logged: Any) -> None:
    root, _, view = logged
    parent = client_of(root).get_run(view.parent_run_id)
    assert parent.info.run_name == "tiny · embedded · decode · 4 jobs"
    assert parent.data.tags["gear.command"] == "python run.py gear.rank=4,8 -m"
    assert "| gear (gear.rank=8) |" in parent.data.tags["mlflow.note.content"]
    assert parent.data.params["model.name"] == "tiny"
    assert "gear.rank" not in parent.data.params
    files = files_of(parent)
    figures = ("pareto", "rank", "bytes_by_term")
    assert set(files) == {
        "report.html",
        *(f"table.{ending}" for ending in ("md", "tex", "csv", "html")),
        *(f"{name}.{ending}" for name in figures for ending in ("png", "pdf", "csv")),
    }
    assert b"<td>gear (gear.rank=8)</td>" in files["table.html"]
    assert view.parent_run_id.encode() not in b"".join(files.values())


def test_a_parent_is_named_by_its_experiment(root: Path) -> None:
    records = commit(root, [finished("kivi", 0.25)])
    view = log_sweep(root, records, ["experiment=mine", "-m"], MLFLOW)
    parent = client_of(root).get_run(view.parent_run_id)
    assert parent.info.run_name == "mine · tiny · embedded · decode · 1 job"
    assert parent.data.tags["gear.experiment"] == "mine"


def test_a_jobs_samples_and_layers_are_tables_that_mlflow_reads(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store_uri(root, MLFLOW))  # load_table asks it alone
    (record,) = commit(root, [{**finished("kivi", 0.25), "words": ["cache=kivi", "seed=0"]}])
    samples = [
        {"document": f"d{i}", "text": "long " * 100, "tokens": [i, 2], "absent": None}
        for i in range(250)
    ]
    text = "".join(json.dumps(sample) + "\n" for sample in samples)
    path = store.record_dir(root, record["key"]) / store.SAMPLES
    path.write_text(text, encoding="utf-8")
    view = log_sweep(root, [record], [], MLFLOW)
    client, run_id = client_of(root), view.run_ids[record["key"]]
    experiment = client.get_experiment_by_name("gear").experiment_id
    shown = client.load_table(experiment, "samples.json", [run_id])
    assert list(shown.columns) == ["document", "text", "tokens"]
    assert len(shown) == 200
    assert shown["text"][0] == ("long " * 100)[:299] + "…"
    assert shown["tokens"][7] == "[7, 2]"
    layers = client.load_table(experiment, "layers.json", [run_id])
    assert list(layers["stored_bytes"]) == [75_000, 75_000]
    note = client.get_run(run_id).data.tags["mlflow.note.content"]
    assert "the first 200 of 250 samples, texts cut to 300 characters" in note
    assert "python run.py cache=kivi seed=0" in note


def test_views_of_the_experiment_have_what_varies_and_what_is_measured(root: Path) -> None:
    def columns(name: str) -> list[str]:
        tags = client_of(root).get_experiment_by_name("gear").tags
        view = json.loads(tags[f"mlflow.sharedViewState.gear-{name}"])
        state = json.loads(view["state"])
        assert view["selectedColumns"] == state["selectedColumns"]  # MLflow before 3.17 reads it
        return state["selectedColumns"]

    first = columns("perplexity")
    assert first[:2] == ["metrics.`kv/size_pct`", "metrics.`quality/ppl_token/decode`"]
    assert {"params.`gear.rank`", "params.`cache.name`", "tags.`gear.model`"} <= set(first)
    assert "params.`gear.bits`" not in first
    settings = [GearConfig(bits=bits) for bits in (2, 4)]
    log_sweep(root, commit(root, [finished(settings=s) for s in settings]), [], MLFLOW)
    asked = commit(root, [finished("kivi", eval={"task": "downstream"})])
    log_sweep(root, asked, [], MLFLOW)
    assert set(columns("perplexity")) == {*first, "params.`gear.bits`"}
    assert set(columns("sweeps")) >= {*columns("perplexity"), *columns("downstream")}


def test_the_same_sweep_in_another_order_adds_nothing(root: Path) -> None:
    before = {name: run.to_dictionary() for name, run in runs_of(root).items()}
    records = [on_disk(root, r) for r in [failed(settings=GearConfig(rank=16)), *sweep()]]
    log_sweep(root, records, ["another=command"], MLFLOW)
    assert {name: run.to_dictionary() for name, run in runs_of(root).items()} == before


def test_another_sweep_shows_an_older_record_again(root: Path, logged: Any) -> None:
    old = on_disk(root, sweep()[0])
    (new,) = commit(root, [finished("kivi", 0.25)])
    view = log_sweep(root, [old, new], [], MLFLOW)
    client = client_of(root)
    reused = client.get_run(view.run_ids[old["key"]])
    assert reused.info.run_id != old["mlflow_run_id"]
    assert reused.data.tags["gear.reused"] == "true"
    assert reused.data.metrics == old["metrics"]
    assert client.get_run(view.run_ids[new["key"]]).data.tags["gear.reused"] == "false"
    assert on_disk(root, old)["mlflow_run_id"] == logged[2].run_ids[old["key"]]


def test_a_job_that_failed_and_now_finished_is_the_same_run(root: Path) -> None:
    dead = on_disk(root, failed(settings=GearConfig(rank=16)))
    again = finished("gear", 0.03125, settings=GearConfig(rank=16))
    assert again["key"] == dead["key"]
    commit(root, [again])
    records = [on_disk(root, record) for record in (*sweep(), again)]
    view = log_sweep(root, records, ARGV, MLFLOW)
    runs = runs_of(root)
    assert len(runs) == 5
    run = runs["gear (gear.rank=16)"]
    assert (run.info.run_id, run.info.status) == (dead["mlflow_run_id"], "FINISHED")
    assert run.data.metrics == again["metrics"]
    parent = client_of(root).get_run(view.parent_run_id)
    assert parent.info.status == "FINISHED"
    assert "FAILED" not in parent.data.tags["mlflow.note.content"]


def test_a_run_cut_short_is_completed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    records = commit(root, [finished("kivi", 0.25), finished("kcvt", 0.5)])
    whole = MlflowClient.log_batch

    def cut(self: Any, run_id: str, *args: Any, **kwargs: Any) -> None:
        if self.get_run(run_id).data.tags.get("gear.key") == records[1]["key"]:
            raise OSError("the disk is full")
        whole(self, run_id, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", cut)
        with pytest.raises(TrackingError, match="the disk is full"):
            log_sweep(root, records, [], MLFLOW)
    assert runs_of(root)["kcvt"].info.status == "RUNNING"
    view = log_sweep(root, records, [], MLFLOW)
    runs = runs_of(root)
    assert len(runs) == 8
    assert runs["kcvt"].info.status == "FINISHED"
    assert runs["kcvt"].data.metrics == records[1]["metrics"]
    assert runs["kcvt"].info.run_id == view.run_ids[records[1]["key"]]


def test_a_description_that_somebody_edited_stays(root: Path, logged: Any) -> None:
    client = client_of(root)
    client.set_tag(logged[2].parent_run_id, "mlflow.note.content", "my words")
    log_sweep(root, [on_disk(root, record) for record in logged[1]], ARGV, MLFLOW)
    parent = client.get_run(logged[2].parent_run_id)
    assert parent.data.tags["mlflow.note.content"] == "my words"


@pytest.mark.fault
def test_numbers_that_mlflow_cannot_hold_are_left_out(root: Path) -> None:
    record = finished("kivi", 0.25)
    commit(root, [record])
    odd = {"quality/a": math.inf, "quality/b": math.nan, "quality/c, d": 1.0}
    log_sweep(root, [{**record, "metrics": odd}], [], MLFLOW)
    assert runs_of(root)["kivi"].data.metrics == {"quality/c_ d": 1.0}


def test_long_and_many_parameters_fit(root: Path) -> None:
    many = {f"option_{i}": i for i in range(150)} | {"text": "x" * 7000}
    (record,) = commit(root, [finished("kivi", 0.25, model=many)])
    log_sweep(root, [record], [], MLFLOW)
    params = runs_of(root)["kivi"].data.params
    assert params["model.option_149"] == "149"
    assert params["model.text"] == "x" * 6000


@pytest.mark.fault
def test_a_moved_root_takes_its_files_along(root: Path, tmp_path: Path) -> None:
    moved = root.rename(tmp_path / "moved")
    records = commit(moved, [finished("kivi", 0.25)])
    log_sweep(moved, records, [], MLFLOW)
    runs = runs_of(moved)
    assert len(runs) == 7
    assert all(run.info.artifact_uri.startswith(artifacts_uri(moved)) for run in runs.values())
    assert json.loads(files_of(runs["gear (gear.rank=8)"])["record.json"])["status"] == "FINISHED"


def test_rebuilt_from_records_alone_it_is_the_same(root: Path) -> None:
    def content(run: Any) -> tuple[Any, ...]:
        own = ("mlflow.parentRunId", "gear.parent")
        tags = {k: v for k, v in run.data.tags.items() if k not in own}
        times = run.info.start_time, run.info.end_time, run.info.status
        files = {n: sha256(content).hexdigest() for n, content in files_of(run).items()}
        data = [to_json(dataset) for dataset in run.inputs.dataset_inputs]
        return run.data.params, run.data.metrics, tags, times, files, data

    def to_json(dataset: Any) -> str:
        return json.dumps(dataset.to_dictionary(), sort_keys=True)

    def tags() -> dict[str, str]:
        return client_of(root).get_experiment_by_name("gear").tags

    commit(root, [finished("kivi", 0.25)])  # of no sweep yet
    sync(root, MLFLOW)
    before, described = {name: content(run) for name, run in runs_of(root).items()}, tags()
    assert len(before) == 7
    shutil.rmtree(root / "artifacts")
    (root / "mlflow.db").unlink()
    ids = {record["key"]: record["mlflow_run_id"] for record in store.records(root)}
    views = sync(root, MLFLOW)
    assert {name: content(run) for name, run in runs_of(root).items()} == before
    assert tags() == described
    assert {record["key"]: record["mlflow_run_id"] for record in store.records(root)} == ids
    assert {key for view in views for key in view.run_ids} == set(ids)


def test_sync_shows_a_record_of_no_sweep_by_itself(root: Path) -> None:
    (record,) = commit(root, [finished("kivi", 0.25)])
    for _ in range(2):
        views = sync(root, MLFLOW)
        assert [len(view.run_ids) for view in views] == [4, 1]
        assert on_disk(root, record)["mlflow_run_id"] == views[1].run_ids[record["key"]]
    assert len(runs_of(root)) == 7


def test_an_experiment_that_was_deleted_says_so(root: Path, logged: Any) -> None:
    client = client_of(root)
    client.delete_experiment(client.get_experiment_by_name("gear").experiment_id)
    with pytest.raises(TrackingError, match="experiment_name='gear' was deleted"):
        log_sweep(root, [on_disk(root, record) for record in logged[1]], ARGV, MLFLOW)


@pytest.mark.fault
def test_a_server_that_does_not_answer_is_an_error_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    records = commit(tmp_path, [finished()])
    with pytest.raises(TrackingError, match=r"http://127\.0\.0\.1:9: .*records are safe"):
        log_sweep(tmp_path, records, ARGV, replace(MLFLOW, uri="http://127.0.0.1:9"))
    assert on_disk(tmp_path, records[0]) == records[0]
