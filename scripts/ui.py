"""Open the runs in MLflow's own pages, on this machine only: ``python scripts/ui.py``.

Runs the command that every sweep prints at its end (``--print`` shows it and does nothing), says
when it answers and where the newest sweep is, and ends with Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# A checkout that is not installed: the packages lie beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evals.record import results_root
from evals.schema import TrackingConfig
from evals.tracking_columns import VIEW_TAG, view_id
from evals.tracking_store import (
    PORT,
    TrackingError,
    artifacts_uri,
    database,
    is_new,
    prepare,
    store_uri,
    ui_command,
)

START_S = 120.0
"""Seconds the server may take to answer; MLflow's imports alone take ten on a slow machine."""


def main() -> int:
    """Serve until Ctrl-C; return the exit code."""
    parser = argparse.ArgumentParser(description="Open the runs in MLflow on 127.0.0.1.")
    parser.add_argument("--port", type=int, default=PORT, help=f"port (default {PORT})")
    parser.add_argument("--uri", help="tracking store (default: the results root's own database)")
    parser.add_argument("--print", action="store_true", help="print the command and stop")
    args = parser.parse_args()
    root, tracking = results_root(), TrackingConfig(name="mlflow", uri=args.uri)
    try:
        command = ui_command(root, tracking, args.port)
        if args.print or database(store_uri(root, tracking)) is None:
            print(command)
            return 0
        _check(root, tracking)
    except TrackingError as error:
        print(error, file=sys.stderr)
        return 1
    if _is_taken(args.port):
        print(f"--port={args.port}: something answers there; choose another.", file=sys.stderr)
        return 1
    return _serve(command, args.port)


def _check(root: Path, tracking: TrackingConfig) -> None:
    """Raise TrackingError where there is nothing that can be shown."""
    path = database(store_uri(root, tracking))
    if path is None or is_new(path):
        raise TrackingError(path, "there is no database yet", "Run python run.py first.")
    prepare(path, artifacts_uri(root) if tracking.uri is None else None)


def _is_taken(port: int) -> bool:
    """Tell whether some program serves on the port already."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _serve(command: str, port: int) -> int:
    """Run the command in a session of its own, so that its children end with it."""
    # The very text that is printed, so a shell has to read it; every part of it is quoted.
    server = subprocess.Popen(f"exec env {command}", shell=True, start_new_session=True)  # noqa: S602
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        if not _answers(server, port):
            print(f"MLflow did not start within {START_S:.0f} s: {command}", file=sys.stderr)
            return 1
        print(f"MLflow is at http://127.0.0.1:{port} (Ctrl-C ends it)", flush=True)
        for line in _newest(port):
            print(line, flush=True)
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _newest(port: int) -> list[str]:
    """Return where the sweep that finished last is, and its experiment in the columns made for it.

    Nothing where the server has no sweep: it is then of somebody else.
    """
    found = _ask(port, "experiments/search", {"max_results": 1000, "view_type": "ACTIVE_ONLY"})
    experiments = {item["experiment_id"]: item for item in found.get("experiments", [])}
    query = {
        "experiment_ids": list(experiments),
        "filter": "tags.`gear.kind` = 'sweep'",
        "order_by": ["attributes.end_time DESC"],
        "max_results": 1,
    }
    runs = _ask(port, "runs/search", query).get("runs", []) if experiments else []
    if not runs:
        return []
    run, experiment = runs[0], experiments[runs[0]["info"]["experiment_id"]]
    page = f"http://127.0.0.1:{port}/#/experiments/{experiment['experiment_id']}/runs"
    # Without it the pages are those of applications that make traces.
    kind = "workflowType=machine_learning"
    lines = [f"newest sweep: {page}/{run['info']['run_id']}?{kind}  ({run['info']['run_name']})"]
    for name in sorted(tag["key"] for tag in experiment.get("tags", [])):
        if name.startswith(prefix := VIEW_TAG + view_id("")):
            view = name.removeprefix(prefix)
            lines.append(f"view of {view}: {page}?{kind}&viewStateShareKey={view_id(view)}")
    return lines


def _ask(port: int, what: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the server's answer to a question of MLflow's REST interface; nothing if it has none.

    The pages open without it, so it is no reason to end them.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.suppress(OSError, ValueError), contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/api/2.0/mlflow/{what}", json.dumps(body), headers)
        answer = json.load(connection.getresponse())
        return answer if isinstance(answer, dict) else {}
    return {}


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the server answers; False once it has ended or taken too long."""
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        # Not urllib: a proxy of the environment has no business with loopback.
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        time.sleep(0.2)
    return False


if __name__ == "__main__":
    sys.exit(main())
