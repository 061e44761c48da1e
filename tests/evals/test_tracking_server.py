"""Records in a tracking server of their own: exactly once, whole, and no password left behind."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from evals.schema import TrackingConfig
from evals.tracking import log_sweep, sync
from evals.tracking_store import TrackingError, store_uri
from tests.evals.fake_records import commit, failed, on_disk, sweep
from tests.evals.test_ui import ask, free_port, output

MLFLOW = TrackingConfig(name="mlflow")
PASSWORD = "correct-horse"  # noqa: S105
START_S = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A real ``mlflow server`` with a database and a folder of files of its own: (URI, folder)."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port),
        "--backend-store-uri", f"sqlite:///{folder}/server.db", "--workers", "1",
        "--artifacts-destination", str(folder / "files"),
    ]  # fmt: skip
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)  # noqa: S603
    try:
        _wait(process, port)
        yield f"http://127.0.0.1:{port}", folder
    finally:
        process.terminate()
        process.wait(60)


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            ask(port, "/health")
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    pytest.fail("mlflow server did not start")


def content(uri: str, files: Path | None) -> dict[str, Any]:
    """Return all that a store shows, by run name; ``files`` is a server's folder of them."""
    from mlflow.tracking import MlflowClient

    client, found = MlflowClient(uri, uri), {}
    for run in client.search_runs([client.get_experiment_by_name("gear").experiment_id]):
        tags = {k: v for k, v in run.data.tags.items() if k not in OWN_TAGS}
        place = run.info.artifact_uri.removeprefix("file://").removeprefix("mlflow-artifacts:/")
        folder = files / place if files else Path(place)
        hashes = {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        data = [item.to_dictionary() for item in run.inputs.dataset_inputs]
        found[run.info.run_name] = (
            run.data.params, run.data.metrics, tags, run.info.status, hashes, data,
        )  # fmt: skip
    return found


OWN_TAGS = ("mlflow.parentRunId", "gear.parent")
"""They name runs, which every store numbers by itself."""


def test_a_server_gets_every_record_exactly_once_and_as_a_local_store_has_it(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, folder = server
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "somebody")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    records = commit(tmp_path, [*sweep(), failed("kivi")])
    view = log_sweep(tmp_path, records, ["cache=gear,kivi", "-m"], MLFLOW)
    for _ in range(2):
        synced = output(tmp_path, "sync_mlflow.py", "--uri", uri)
        assert synced.stdout == (
            f"1 sweeps with 4 jobs from {tmp_path}/records are in MLflow.\n{uri}\n"
        )
        there = content(uri, folder / "files")
        assert len(there) == 5
        assert there == content(store_uri(tmp_path, MLFLOW), None)
    (again,) = sync(tmp_path, replace(MLFLOW, uri=uri))
    assert set(again.run_ids) == set(view.run_ids)
    assert on_disk(tmp_path, records[0])["mlflow_run_id"] == view.run_ids[records[0]["key"]]
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) > 40
    assert not [path for path in kept if PASSWORD.encode() in path.read_bytes()]
    assert PASSWORD not in synced.stdout + synced.stderr


def test_a_password_of_the_environment_is_sent_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str | None] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent.append(self.headers["Authorization"])
            self.send_response(401)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "somebody")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    records = commit(tmp_path, sweep())
    with HTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{refusing.server_port}"
        with pytest.raises(TrackingError, match=r"401.*records are safe") as caught:
            log_sweep(tmp_path, records, [], replace(MLFLOW, uri=uri))
        refusing.shutdown()
    assert sent[0] == "Basic " + base64.b64encode(f"somebody:{PASSWORD}".encode()).decode()
    assert PASSWORD not in str(caught.value)
    assert on_disk(tmp_path, records[0]) == records[0]
