"""Machines that share records through an object store, and a database that only the parent writes.

The store is S3's protocol on loopback (moto's server) or a folder; the database is PostgreSQL
behind an MLflow server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from evals import record as store
from evals.share import Share
from tests.evals.test_tracking_server import content
from tests.evals.test_ui import free_port
from tests.faults.launched import (
    LAUNCHERS,
    begin,
    computed,
    ended,
    installed,
    same,
    stand_in,
    table,
)

pytestmark = pytest.mark.fault
START_S = 120


def answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()  # noqa: S310
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    pytest.fail(f"no server at {url}: {log.read_text()[-2000:]}")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Servers that a test starts; they end with it, the last first."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in reversed(processes):
        process.terminate()
        process.wait(60)


@pytest.fixture
def bucket(
    served: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """An empty bucket of an S3 store on loopback."""
    if find_spec("s3fs") is None or find_spec("moto") is None:
        pytest.skip("s3fs or moto is not installed: pip install -e '.[cluster,test]'")
    import boto3

    port, log = free_port(), tmp_path / "moto.log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as file:
        served.append(subprocess.Popen(command, stdout=file, stderr=file))  # noqa: S603
    url = f"http://127.0.0.1:{port}"
    answers(url, served[-1], log)
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "correct-horse")
    boto3.client("s3").create_bucket(Bucket="results")
    return "s3://results/gear"


def test_another_machine_takes_what_is_in_the_bucket_and_a_store_that_is_away_loses_nothing(
    bucket: str,
    served: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, here = ("tracking=none", f"job.share={bucket}"), tmp_path / "here"
    code, shown, err = ended(begin(here, *words, **stand_in()))
    assert code == 0, err
    there = tmp_path / "there"
    code, out, err = ended(begin(there, *words, **stand_in(gear="raises")))
    assert code == 0, err
    assert same(here, there)
    assert table(out) == table(shown)
    assert not (there / "computed.txt").exists()
    served[-1].terminate()
    served[-1].wait(60)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    away = tmp_path / "away"
    code, out, err = ended(begin(away, *words, **stand_in()))
    assert code == 1
    assert same(here, away)
    assert table(out) == table(shown)
    assert f"job.share={bucket}: " in err
    assert "the same command again shares them" in err
    assert "correct-horse" not in err


def test_a_half_written_object_is_computed_again_and_put_whole(tmp_path: Path) -> None:
    folder, words = tmp_path / "share", ("tracking=none", f"job.share=file://{tmp_path}/share")
    here, there = tmp_path / "here", tmp_path / "there"
    code, _, err = ended(begin(here, *words, **stand_in()))
    assert code == 0, err
    torn = max(folder.glob("*.zip"))
    torn.write_bytes(torn.read_bytes()[:-30])
    code, _, err = ended(begin(there, *words, **stand_in()))
    assert code == 0, err
    assert same(here, there)
    assert computed(there) == [torn.stem]
    with store.lock(tmp_path / "third", torn.stem):
        assert Share(f"file://{folder}").get(tmp_path / "third", torn.stem) is not None


@pytest.fixture
def postgresql(tmp_path: Path) -> Iterator[str]:
    """The address of a database of a PostgreSQL on loopback."""
    found = [shutil.which("initdb"), *map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    program = next(filter(None, found), None)
    if program is None or find_spec("psycopg2") is None:
        pytest.skip("apt-get install postgresql, and pip install -e '.[test]', for this one")
    # It refuses to run as root, and who it runs as must reach its folder: below none of pytest's.
    owner = "postgres" if os.geteuid() == 0 else None
    data, port = Path(tempfile.mkdtemp(prefix="gear-postgres-")), free_port()
    if owner is not None:
        shutil.chown(data, owner)
    made = [program, "-D", data, "-A", "trust", "-U", "gear", "-N"]
    server = Path(program).resolve().parent / "postgres"
    command = [server, "-D", data, "-k", data, "-h", "127.0.0.1", "-p", str(port), "-F"]
    with (tmp_path / "postgres.log").open("wb") as log:
        subprocess.run(made, check=True, stdout=log, user=owner, cwd=data)  # noqa: S603
        process = subprocess.Popen(command, stdout=log, stderr=log, user=owner, cwd=data)  # noqa: S603
    try:
        yield f"postgresql+psycopg2://gear@127.0.0.1:{port}/postgres"
    finally:
        process.send_signal(signal.SIGINT)  # do not wait for clients
        process.wait(60)
        shutil.rmtree(data)


def test_an_mlflow_server_on_postgresql_is_written_by_the_parent_alone(
    postgresql: str, served: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    port, log = free_port(), tmp_path / "mlflow.log"
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port),
        "--backend-store-uri", postgresql, "--workers", "1",
        "--artifacts-destination", str(tmp_path / "files"),
    ]  # fmt: skip
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as file:
        served.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))  # noqa: S603
    uri = f"http://127.0.0.1:{port}"
    answers(f"{uri}/health", served[-1], log)
    launcher = LAUNCHERS["joblib"] if installed("joblib") else ()
    alone, tracked = tmp_path / "alone", tmp_path / "tracked"
    code, one_by_one, err = ended(begin(alone, "tracking=none", **stand_in()))
    assert code == 0, err
    for _ in range(2):  # the second command adds nothing
        code, out, err = ended(begin(tracked, f"tracking.uri={uri}", *launcher, **stand_in()))
        assert code == 0, err
        assert same(alone, tracked)
        # the last column names the run where there is one, else the key
        assert [row[:-1] for row in table(out)] == [row[:-1] for row in table(one_by_one)]
        runs = content(uri, tmp_path / "files")
        assert len(runs) == 5
        found = {tags["gear.key"] for _, _, tags, *_ in runs.values() if "gear.key" in tags}
        assert found == {record["key"] for record in store.records(tracked)}
    assert not (tracked / "mlflow.db").exists()
