"""What the tests of faults share."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals.schema import TrackingConfig
from evals.tracking import log_sweep
from tests.evals.fake_records import commit, finished


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with one sweep in it: making one takes seconds, so tests copy it."""
    root = tmp_path_factory.mktemp("made")
    log_sweep(root, commit(root, [finished("fp16")]), [], TrackingConfig(name="mlflow"))
    return root / "mlflow.db"
