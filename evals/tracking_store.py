"""The tracking database as a file: where it is, and whether it can be written. No MLflow here.

MLflow retries a broken database for minutes; asking SQLite first takes a millisecond and says what
is wrong. Everything in it is a view of the records, so nothing here can lose a result.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from evals.schema import TrackingConfig

PORT = 5001
"""Where the printed command serves; 5000 is AirPlay's on a Mac."""
BUSY_S = 5.0
"""Seconds to wait for another program that is writing to the database."""
LOCK_S = 600.0
"""Seconds to wait for another sweep that is logging."""


class TrackingError(ValueError):
    """Runs could not be shown in MLflow; the records are complete all the same."""

    def __init__(self, where: object, problem: str, next_step: str) -> None:
        super().__init__(
            f"tracking store {where}: {problem}. {next_step} The records are safe; the same "
            "command again (or scripts/sync_mlflow.py) then shows them in MLflow."
        )


def uri_problem(uri: str | None) -> tuple[str, str, str] | None:
    """Return where, why and what next for a ``tracking.uri`` that cannot be used, else None.

    What may be secret in it is left out.
    """
    if uri is None or uri.startswith("sqlite:///"):
        return None
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return (
            f"tracking.uri={parts.scheme}:…", "must be sqlite:///path/mlflow.db, http://… or https://…",
            "MLflow no longer writes folders of files.",
        )  # fmt: skip
    if "@" in parts.netloc or parts.query:
        # It would be kept: commands are shown beside their results.
        return (
            f"tracking.uri={parts.scheme}://…", "must hold no user name, password or query",
            "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN.",
        )  # fmt: skip
    return None


def store_uri(root: Path, tracking: TrackingConfig) -> str:
    """Return the absolute URI of the store. TrackingError for one that cannot be used."""
    if (problem := uri_problem(tracking.uri)) is not None:
        raise TrackingError(*problem)
    if tracking.uri is None:
        return f"sqlite:///{root.resolve() / 'mlflow.db'}"
    if tracking.uri.startswith("sqlite:///"):
        return f"sqlite:///{Path(tracking.uri.removeprefix('sqlite:///')).resolve()}"
    return tracking.uri


def database(uri: str) -> Path | None:
    """Return the file behind a store URI, None for a server."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:") else None


def ui_command(root: Path, tracking: TrackingConfig, port: int = PORT) -> str:
    """Return the whole command that opens the store on loopback, or a remote store's address."""
    uri = store_uri(root, tracking)
    if database(uri) is None:
        return uri
    here = Path(sys.executable).parent
    found = shutil.which("mlflow")
    on_path = found and Path(found).parent == here
    program = "mlflow" if on_path else f"{shlex.quote(sys.executable)} -m mlflow"
    hosts = f"127.0.0.1:{port},localhost:{port}"
    # Without job execution the server starts one process and not eight.
    return (
        f"MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false "
        f"MLFLOW_ALLOW_PICKLE_DESERIALIZATION=false {program} ui "
        f"--backend-store-uri {shlex.quote(uri)} --host 127.0.0.1 --port {port} "
        f"--allowed-hosts {hosts} --workers 1 --uvicorn-opts '--log-level warning'"
    )


@contextmanager
def locked(root: Path, uri: str) -> Iterator[None]:
    """Let one process at a time create the database and look up or add runs."""
    path = database(uri) or root / "mlflow"
    lock = path.with_name(path.name + ".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=LOCK_S):
            yield
    except Timeout:
        raise TrackingError(
            lock, f"another sweep has been logging for {LOCK_S:.0f} s", "Wait for it or end it."
        ) from None


def is_new(path: Path) -> bool:
    """Tell whether there is no database yet (an empty file is one that was never begun)."""
    return not path.exists() or (path.is_file() and not path.stat().st_size)


def prepare(path: Path, artifacts: str | None) -> None:
    """Raise TrackingError unless the database can be written now; follow a move to ``artifacts``.

    ``artifacts`` is the results root's :func:`artifacts_uri`, None for a database that is not the
    root's own.
    """
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            # A file in a read-only folder takes the lock and fails at its first write: try one.
            connection.execute("PRAGMA user_version = 0")
            connection.execute("ROLLBACK")
            if artifacts is not None:
                _follow_move(connection, artifacts)
    except sqlite3.Error as error:
        raise TrackingError(path, str(error), next_step(path, str(error))) from error


def next_step(path: Path, problem: str) -> str:
    """Return what to do about a message of SQLite or of the system."""
    if "locked" in problem:
        return "End the program that holds it (`lsof` names it)."
    if "readonly" in problem or "unable to open" in problem:
        return "Make the file and its folder writable, or set tracking.uri or GEAR_MLRUNS."
    if "disk is full" in problem or os.strerror(errno.ENOSPC) in problem:
        return "Free space, or set tracking.uri or GEAR_MLRUNS."
    return f"If it is broken, move it away (mv {path} {path}.bad): it is made anew."


def artifacts_uri(root: Path) -> str:
    """Return the URI under which a local store's runs keep their files."""
    return (root.resolve() / "artifacts").as_uri()


def _follow_move(connection: sqlite3.Connection, artifacts: str) -> None:
    """Point the runs of a moved or copied results root at the files that moved with it.

    MLflow stores absolute places only. Ours are those that end in /artifacts.
    """
    ours = "SELECT DISTINCT artifact_location FROM experiments WHERE artifact_location LIKE ?"
    connection.execute("BEGIN IMMEDIATE")
    for (old,) in connection.execute(ours, ("file:%/artifacts",)).fetchall():
        if old != artifacts:
            connection.execute(
                "UPDATE experiments SET artifact_location = ? WHERE artifact_location = ?",
                (artifacts, old),
            )
            connection.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?)"
                " WHERE instr(artifact_uri, ?) = 1",
                (artifacts, len(old) + 1, f"{old}/"),
            )
    connection.execute("COMMIT")
