"""A disk that is really full: the system takes the first bytes of a write and no more.

The limit is the process's own on the size of a file (RLIMIT_FSIZE), the same short write.
"""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest

from evals import record as store
from tests.evals.fake_records import finished
from tests.faults import forked

pytestmark = pytest.mark.fault


def _commit(root: Path, record: Path, limit: int) -> None:
    """Commit a record where no file may grow beyond ``limit`` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    new = json.loads(record.read_text())
    try:
        store.commit(root, new["key"], new)
    except OSError:
        raise SystemExit(28) from None


@pytest.mark.parametrize("limit", [0, 1, 100])
def test_a_record_that_does_not_fit_leaves_the_old_one(tmp_path: Path, limit: int) -> None:
    old, root = finished(), tmp_path / "root"
    store.commit(root, old["key"], old)
    (tmp_path / "new").write_text(json.dumps({**old, "started": "later"}))
    assert forked.run(_commit, root, tmp_path / "new", limit) == 28
    assert list(store.records(root)) == [old]
    folder = store.record_dir(root, old["key"])
    assert [path.name for path in folder.iterdir()] == [store.RECORD]
    assert forked.run(_commit, root, tmp_path / "new", 1 << 20) == 0
    assert [record["started"] for record in store.records(root)] == ["later"]
