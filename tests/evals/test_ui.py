"""The scripts: sync fills the store; the printed command serves it on loopback and to no other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from evals.schema import TrackingConfig
from evals.sweeps import remember
from evals.tracking_store import ui_command
from tests.evals.fake_records import commit, on_disk, sweep

MLFLOW = TrackingConfig(name="mlflow")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(root: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and environment of a script on a results root."""
    environment = {**os.environ, "GEAR_MLRUNS": str(root)}
    return [sys.executable, str(SCRIPTS / arguments[0]), *arguments[1:]], environment


def output(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    command, environment = script(root, *arguments)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port: int, path: str, body: Any = None, host: str | None = None) -> bytes:
    """Return what the server answers."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Host": host} if host else {})
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=20) as answer:
        return answer.read()


def test_sync_fills_the_store_and_the_printed_command_serves_it(tmp_path: Path) -> None:
    records = commit(tmp_path, sweep())
    remember(tmp_path, [record["key"] for record in records], ["-m"], "gear")
    synced = output(tmp_path, "sync_mlflow.py")
    assert f"1 sweeps with 3 jobs from {tmp_path}/records are in MLflow." in synced.stdout
    port = free_port()
    printed = output(tmp_path, "ui.py", "--port", str(port), "--print").stdout.strip()
    assert printed == ui_command(tmp_path, MLFLOW, port)
    command, environment = script(tmp_path, "ui.py", "--port", str(port))
    server = subprocess.Popen(  # noqa: S603
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        assert any(f"MLflow is at http://127.0.0.1:{port}" in line for line in server.stdout)
        newest, *views = [server.stdout.readline() for _ in range(3)]
        assert newest.startswith(f"newest sweep: http://127.0.0.1:{port}/#/experiments/1/runs/")
        assert newest.endswith(
            "?workflowType=machine_learning  (tiny · embedded · decode · 3 jobs)\n"
        )
        assert [line.split(": ")[0] for line in views] == ["view of perplexity", "view of sweeps"]
        assert all(line.split("viewStateShareKey=")[1].startswith("gear-") for line in views)
        _check_runs(port, tmp_path, records)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            ask(port, "/api/2.0/mlflow/experiments/get?experiment_id=0", host="example.org")
        second = output(tmp_path, "ui.py", "--port", str(port))
        assert second.stderr == f"--port={port}: something answers there; choose another.\n"
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def _check_runs(port: int, root: Path, records: list[dict]) -> None:
    """The server lists the parent and its children, with parameters, metrics and files."""
    experiment = json.loads(
        ask(port, "/api/2.0/mlflow/experiments/get-by-name?experiment_name=gear")
    )["experiment"]["experiment_id"]
    query = {"experiment_ids": [experiment]}
    runs = json.loads(ask(port, "/api/2.0/mlflow/runs/search", query))["runs"]
    assert len(runs) == 4
    run_id = on_disk(root, records[2])["mlflow_run_id"]
    run = next(run for run in runs if run["info"]["run_id"] == run_id)
    assert {"key": "gear.rank", "value": "8"} in run["data"]["params"]
    assert "fidelity/kl_mean" in {metric["key"] for metric in run["data"]["metrics"]}
    text = ask(port, f"/get-artifact?run_uuid={run_id}&path=samples.jsonl")
    assert json.loads(text) == {"document": "a", "nll": 1.5}


def test_nothing_to_show_says_so(tmp_path: Path) -> None:
    nothing = output(tmp_path, "ui.py")
    assert nothing.returncode == 1
    assert "there is no database yet" in nothing.stderr
    assert "Traceback" not in nothing.stderr
    (tmp_path / "mlflow.db").write_bytes(b"garbage" * 100)
    assert "file is not a database" in output(tmp_path, "ui.py").stderr
