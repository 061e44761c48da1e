"""Where the store is: addresses that are refused, and what may be printed of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evals.schema import TrackingConfig
from evals.tracking_store import TrackingError, store_uri, ui_command

MLFLOW = TrackingConfig(name="mlflow")


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns", "postgresql://me:secret@db/x"])
def test_a_store_that_is_not_supported_is_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="must be sqlite") as caught:
        store_uri(tmp_path, replace(MLFLOW, uri=uri))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "uri", ["https://me:secret@host:5000/x", "http://secret@host", "https://host/?token=secret"]
)
def test_a_password_in_the_address_is_refused_and_not_shown(uri: str, tmp_path: Path) -> None:
    config = replace(MLFLOW, uri=uri)
    for read in (lambda: store_uri(tmp_path, config), lambda: ui_command(tmp_path, config)):
        with pytest.raises(TrackingError, match="MLFLOW_TRACKING_PASSWORD") as caught:
            read()
        assert "secret" not in str(caught.value)


def test_a_servers_address_is_the_command() -> None:
    assert ui_command(Path(), replace(MLFLOW, uri="https://host:5000/x")) == "https://host:5000/x"


def test_the_store_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert store_uri(Path("a b"), MLFLOW) == f"sqlite:///{tmp_path}/a b/mlflow.db"
    assert store_uri(Path(), replace(MLFLOW, uri="sqlite:///x.db")) == f"sqlite:///{tmp_path}/x.db"


def test_a_place_with_a_blank_is_quoted() -> None:
    assert " --backend-store-uri 'sqlite:////a b/mlflow.db' " in ui_command(Path("/a b"), MLFLOW)
