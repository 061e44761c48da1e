"""Sweeps that leave the process: joblib, submitit and Ray beside the sequential sweep, and lost."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from evals import record as store
from tests.faults.launched import (
    LAUNCHERS,
    begin,
    computed,
    ended,
    launchers,
    same,
    stand_in,
    table,
)
from tests.faults.test_worker_faults import alive, wait_for

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The jobs one after another, really computed: results root and table."""
    root = tmp_path_factory.mktemp("sequential") / "root"
    code, out, err = ended(begin(root, "tracking=none"))
    assert code == 0, err
    return root, out


@pytest.mark.parametrize("launcher", launchers())
def test_a_launcher_gives_the_records_and_the_table_of_the_sequential_sweep(
    launcher: str, sequential: tuple[Path, str], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    code, out, err = ended(begin(root, "tracking=none", *LAUNCHERS[launcher]))
    assert code == 0, err
    assert len(list(store.records(root))) == 4
    assert same(root, sequential[0])
    assert table(out) == table(sequential[1])
    assert "hold no speeds" in err
    for record in store.records(root):
        assert record["environment"]["launcher"] == launcher
        assert not [name for name in record["metrics"] if name.startswith("speed/")]
        log = (store.record_dir(root, record["key"]) / "log.txt").read_text()
        assert log.count("worker ") == 1  # a process of its own
    assert not (root / "mlflow.db").exists()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Jobs one after another, by the stand-in."""
    root = tmp_path_factory.mktemp("uninterrupted") / "root"
    code, out, err = ended(begin(root, "tracking=none", **stand_in()))
    assert code == 0, err
    return root, out


def lose(root: Path) -> set[str]:
    """Kill the process that the launcher gave to the stuck job; return the keys done by then."""
    told = root / "stuck"
    wait_for(lambda: told.exists() and told.read_text().endswith("\n"), within_s=180)
    worker = psutil.Process(int(told.read_text()))
    job = worker.parent()
    assert job is not None
    done = {record["key"] for record in store.records(root) if record["status"] == "FINISHED"}
    job.kill()
    wait_for(lambda: not alive(worker.pid))  # it ends with the process that waited for it
    return done


@pytest.mark.parametrize("launcher", launchers())
def test_a_lost_process_and_a_killed_worker_are_jobs_run_again(
    launcher: str, uninterrupted: tuple[Path, str], tmp_path: Path
) -> None:
    root, words = tmp_path / "root", ("tracking=none", *LAUNCHERS[launcher])
    sweep = begin(root, *words, **stand_in(kivi="sigkill", gear="stuck"))
    try:
        done = lose(root)
    except BaseException:
        sweep.kill()
        print(*ended(sweep), sep="\n")
        raise
    code, out, err = ended(sweep)
    assert code == 1, err
    records = {r["config"]["cache"]["name"]: r for r in store.records(root)}
    if launcher == "ray":  # it gives the job to another process by itself, and the others go on
        assert len(records) == 4
        assert "left no record" not in err
    else:
        assert "gear" not in records
        assert "the same command again runs what is missing" in err
    if launcher != "joblib":  # which drops its queue with the process
        assert records["kivi"]["error"]["signal"] == "SIGKILL"
        assert "SIGKILL" in out
    code, out, err = ended(begin(root, *words, **stand_in(gear="stuck")))
    assert code == 0, err
    assert same(root, uninterrupted[0])
    assert table(out) == table(uninterrupted[1])
    assert all(computed(root).count(key) == 1 for key in done)
