"""Runs in MLflow: what they hold, that nothing is logged twice, and the printed command."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evals import record as store
from evals import tracking, tracking_runs
from evals.schema import TrackingConfig
from evals.tracking import SweepView, log_sweep, sync
from evals.tracking_store import (
    TrackingError,
    artifacts_uri,
    prepare,
    shown,
    store_uri,
    ui_command,
)
from gear.config import GearConfig
from tests.evals.fake_records import commit, failed, finished, on_disk, sweep

MLFLOW = TrackingConfig(name="mlflow")
ARGV = ["run.py", "gear.rank=4,8", "-m"]
CHECKOUT = Path(__file__).resolve().parents[2]


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
    assert (dataset.dataset.name, dataset.dataset.digest) == ("embedded", "cd" * 18)
    assert dataset.dataset.source_type == "embedded"


def test_a_childs_files(logged: Any) -> None:
    root, records, _ = logged
    files = files_of(runs_of(root)["gear (gear.rank=8)"])
    assert set(files) == {
        "config.yaml", "record.json", "environment.json", "samples.jsonl", "log.txt", "layers.png",
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
    assert parent.data.tags["gear.command"] == "run.py gear.rank=4,8 -m"
    assert "| gear (gear.rank=8) |" in parent.data.tags["mlflow.note.content"]
    assert parent.data.params["model.name"] == "tiny"
    assert "gear.rank" not in parent.data.params
    files = files_of(parent)
    assert set(files) == {"table.md", "table.tex", "table.csv", "pareto.png"}
    assert view.parent_run_id.encode() not in b"".join(files.values())


def test_the_same_sweep_in_another_order_adds_nothing(root: Path) -> None:
    before = {name: run.to_dictionary() for name, run in runs_of(root).items()}
    records = [on_disk(root, r) for r in [failed(settings=GearConfig(rank=16)), *sweep()]]
    log_sweep(root, records, ["run.py", "another command"], MLFLOW)
    assert {name: run.to_dictionary() for name, run in runs_of(root).items()} == before


def test_another_sweep_shows_an_older_record_again(root: Path, logged: Any) -> None:
    old = on_disk(root, sweep()[0])
    (new,) = commit(root, [finished("kivi", 0.25)])
    view = log_sweep(root, [old, new], ["run.py"], MLFLOW)
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
            log_sweep(root, records, ["run.py"], MLFLOW)
    assert runs_of(root)["kcvt"].info.status == "RUNNING"
    view = log_sweep(root, records, ["run.py"], MLFLOW)
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


def test_numbers_that_mlflow_cannot_hold_are_left_out(root: Path) -> None:
    record = finished("kivi", 0.25)
    commit(root, [record])
    odd = {"quality/a": math.inf, "quality/b": math.nan, "quality/c, d": 1.0}
    log_sweep(root, [{**record, "metrics": odd}], ["run.py"], MLFLOW)
    assert runs_of(root)["kivi"].data.metrics == {"quality/c_ d": 1.0}


def test_long_and_many_parameters_fit(root: Path) -> None:
    many = {f"option_{i}": i for i in range(150)} | {"text": "x" * 7000}
    (record,) = commit(root, [finished("kivi", 0.25, model=many)])
    log_sweep(root, [record], ["run.py"], MLFLOW)
    params = runs_of(root)["kivi"].data.params
    assert params["model.option_149"] == "149"
    assert params["model.text"] == "x" * 6000


def test_a_long_table_is_cut_to_whole_lines_in_the_description() -> None:
    records = [finished("kivi", 0.25, seed=seed) for seed in range(100)]
    text = tracking_runs.note("run.py", records)
    assert len(text) <= 8000
    assert text.endswith("|\n\n(cut: see table.md)\n")


def test_a_moved_root_takes_its_files_along(root: Path, tmp_path: Path) -> None:
    moved = root.rename(tmp_path / "moved")
    records = commit(moved, [finished("kivi", 0.25)])
    log_sweep(moved, records, ["run.py"], MLFLOW)
    runs = runs_of(moved)
    assert len(runs) == 7
    assert all(run.info.artifact_uri.startswith(artifacts_uri(moved)) for run in runs.values())
    assert json.loads(files_of(runs["gear (gear.rank=8)"])["record.json"])["status"] == "FINISHED"


def test_rebuilt_from_records_alone_it_is_the_same(root: Path) -> None:
    def content(run: Any) -> tuple[Any, ...]:
        own = ("mlflow.parentRunId", "gear.parent")
        tags = {k: v for k, v in run.data.tags.items() if k not in own}
        times = run.info.start_time, run.info.end_time, run.info.status
        return run.data.params, run.data.metrics, tags, times, files_of(run)

    before = {name: content(run) for name, run in runs_of(root).items()}
    shutil.rmtree(root / "artifacts")
    (root / "mlflow.db").unlink()
    ids = {record["key"]: record["mlflow_run_id"] for record in store.records(root)}
    (view,) = sync(root, MLFLOW)
    assert {name: content(run) for name, run in runs_of(root).items()} == before
    assert {record["key"]: record["mlflow_run_id"] for record in store.records(root)} == ids
    assert set(view.run_ids) == set(ids)


def test_sync_shows_a_record_of_no_sweep_by_itself(root: Path) -> None:
    (record,) = commit(root, [finished("kivi", 0.25)])
    for _ in range(2):
        views = sync(root, MLFLOW)
        assert [len(view.run_ids) for view in views] == [4, 1]
        assert on_disk(root, record)["mlflow_run_id"] == views[1].run_ids[record["key"]]
    assert len(runs_of(root)) == 7


def test_the_diff_of_a_dirty_checkout_stays_with_the_record(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(  # noqa: S603
            command, cwd=tmp_path / "checkout", check=True, capture_output=True, text=True
        ).stdout.strip()

    (tmp_path / "checkout").mkdir()
    git("init", "-q")
    for text in ("old\n", "new\n"):
        (tmp_path / "checkout" / "file").write_text(text, encoding="utf-8")
        if text == "old\n":
            git("add", "file")
            git("commit", "-q", "-m", "first")
    state = {"commit": git("rev-parse", "HEAD"), "dirty": True}
    record = {**finished(), "environment": {"git": state}}
    clean = {**finished("kivi", 0.25), "environment": {"git": {**state, "dirty": False}}}
    commit(tmp_path, [record, clean])
    tracking_runs.keep_diffs(tmp_path, [record, clean], tmp_path / "checkout")
    git("checkout", "file")
    tracking_runs.keep_diffs(tmp_path, [record, clean], tmp_path / "checkout")
    for made, has_diff in ((record, True), (clean, False)):
        run = tracking_runs.job_run(
            tracking.Sweep([made["key"]], [], [], "gear"), made, "name", tmp_path, "parent"
        )
        (tmp_path / "out").mkdir()
        run.write(tmp_path / "out")
        assert (tmp_path / "out" / "git.diff").exists() == has_diff
        assert run.tags["mlflow.source.git.commit"] == state["commit"]
        if has_diff:
            assert "+new" in (tmp_path / "out" / "git.diff").read_text(encoding="utf-8")
        shutil.rmtree(tmp_path / "out")


def test_an_experiment_that_was_deleted_says_so(root: Path, logged: Any) -> None:
    client = client_of(root)
    client.delete_experiment(client.get_experiment_by_name("gear").experiment_id)
    with pytest.raises(TrackingError, match="experiment_name='gear' was deleted"):
        log_sweep(root, [on_disk(root, record) for record in logged[1]], ARGV, MLFLOW)


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns", "postgresql://me:secret@db/x"])
def test_a_store_that_is_not_supported_is_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="must be sqlite") as caught:
        store_uri(tmp_path, replace(MLFLOW, uri=uri))
    assert "secret" not in str(caught.value)


def test_a_servers_password_is_never_shown() -> None:
    assert shown("https://me:secret@host:5000/x") == "https://host:5000/x"
    assert ui_command(Path(), replace(MLFLOW, uri="https://me:secret@host")) == "https://host"


def test_a_server_that_does_not_answer_is_an_error_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    records = commit(tmp_path, [finished()])
    with pytest.raises(TrackingError, match=r"http://127\.0\.0\.1:9: .*records are safe"):
        log_sweep(tmp_path, records, ARGV, replace(MLFLOW, uri="http://127.0.0.1:9"))
    assert on_disk(tmp_path, records[0]) == records[0]


def ask(port: int, path: str, body: Any = None, host: str | None = None) -> bytes:
    """Return what the server answers."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Host": host} if host else {})
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=20) as answer:
        return answer.read()


def test_the_printed_command_serves_the_runs_on_loopback(root: Path, logged: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = [sys.executable, str(CHECKOUT / "scripts" / "ui.py"), "--port", str(port)]
    environment = {**os.environ, "GEAR_MLRUNS": str(root)}
    shown_command = subprocess.run(  # noqa: S603
        [*script, "--print"], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert shown_command == ui_command(root, MLFLOW, port)
    server = subprocess.Popen(  # noqa: S603
        script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        answer = server.stdout.readline()
        while answer and "MLflow is at" not in answer:
            answer = server.stdout.readline()
        assert f"http://127.0.0.1:{port}" in answer
        experiment = json.loads(
            ask(port, "/api/2.0/mlflow/experiments/get-by-name?experiment_name=gear")
        )["experiment"]["experiment_id"]
        found = json.loads(
            ask(port, "/api/2.0/mlflow/runs/search", {"experiment_ids": [experiment]})
        )["runs"]
        assert {run["info"]["run_id"] for run in found} == {
            logged[2].parent_run_id,
            *logged[2].run_ids.values(),
        }
        run_id = logged[2].run_ids[sweep()[2]["key"]]
        run = next(run for run in found if run["info"]["run_id"] == run_id)
        assert {"key": "gear.rank", "value": "8"} in run["data"]["params"]
        assert "fidelity/kl_mean" in {metric["key"] for metric in run["data"]["metrics"]}
        text = ask(port, f"/get-artifact?run_uuid={run_id}&path=samples.jsonl")
        assert json.loads(text) == {"document": "a", "nll": 1.5}
        with pytest.raises(urllib.error.HTTPError, match="403"):
            ask(port, "/api/2.0/mlflow/experiments/get?experiment_id=0", host="example.org")
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
