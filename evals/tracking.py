"""Runs in MLflow: a view of the records, which stay the truth. The only module that imports mlflow.

A sweep (a distinct set of jobs) is one parent run; each of its records is one child, logged anew
under every sweep that uses it. Runs are found again by their tags, so logging the same sweep twice,
or after a crash, adds nothing and completes what is missing. Explicit client calls on an explicit
store: no active run, no autologging, no telemetry, no network but that of a remote store.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals import record as store
from evals import sweeps, tracking_columns, tracking_runs
from evals.environment import CHECKOUT
from evals.schema import TrackingConfig
from evals.settings import labels
from evals.sweeps import Sweep
from evals.tracking_runs import TAG_LENGTH, RunView
from evals.tracking_store import (
    TrackingError,
    artifacts_uri,
    database,
    is_new,
    locked,
    next_step,
    prepare,
    store_uri,
    ui_command,
)

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run
    from mlflow.tracking import MlflowClient

Record = dict[str, Any]

PARAMS_PER_CALL = 100
"""Parameters that one call may log."""
DIGEST_LENGTH = 12
"""Characters of a dataset's content hash beside its name; a parameter has it whole."""


@dataclass(frozen=True)
class SweepView:
    """Where a sweep is seen: its parent run, the run of each record key, how to open them."""

    parent_run_id: str
    run_ids: dict[str, str]
    ui_command: str


def log_sweep(
    root: Path, records: Sequence[Record], argv: list[str], tracking: TrackingConfig
) -> SweepView:
    """Show a sweep's records in MLflow and fill in the records' run ids that are still null.

    ``argv`` is what followed run.py on the command line.
    TrackingError says why it cannot be (locked, read-only, not a database, unreachable, ...).
    """
    with _explained(root, tracking):
        by_key = {record["key"]: record for record in records}
        sweep = sweeps.remember(root, list(by_key), argv, tracking.experiment_name)
        tracking_runs.keep_diffs(root, records, CHECKOUT)
        return _show(root, [(sweep, [by_key[key] for key in sweep.keys])], tracking)[0]


def sync(root: Path, tracking: TrackingConfig) -> list[SweepView]:
    """Show every sweep on disk, adding what the store lacks; records of no sweep one by one.

    Raises TrackingError as :func:`log_sweep` does.
    """
    with _explained(root, tracking):
        return _show(root, sweeps.with_records(root, tracking.experiment_name), tracking)


@contextmanager
def _explained(root: Path, tracking: TrackingConfig) -> Iterator[None]:
    """Turn whatever MLflow, SQLAlchemy or the disk raise into a TrackingError.

    All of them, because a view that fails must not take a sweep's results down with it. What
    MLflow's parts warn of each other is kept from whoever waits for a table.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except TrackingError:
        raise
    except Exception as error:
        uri = store_uri(root, tracking)
        path, problem = database(uri), f"{type(error).__name__}: {error}"
        step = next_step(path, problem) if path else "Is it running?"
        raise TrackingError(uri, problem, step) from error


def _show(
    root: Path, pairs: Sequence[tuple[Sweep, Sequence[Record]]], tracking: TrackingConfig
) -> list[SweepView]:
    """Log sweeps with their records, one process at a time."""
    root, uri = root.resolve(), store_uri(root, tracking)
    _load_mlflow()
    with locked(root, uri):
        client, command = _client(root, uri, tracking), ui_command(root, tracking)
        views = []
        for sweep, found in pairs:
            experiment = _experiment(client, root, uri, sweep.experiment, found)
            parent, ids = _put_sweep(client, experiment, root, sweep, found)
            views.append(SweepView(parent, ids, command))
        return views


def _load_mlflow() -> None:
    """Import MLflow (two seconds), quietly and with nothing that calls home."""
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # one of a server for every run
    # A pooled connection would outlive a deleted file; a dead server is not worth minutes.
    os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    import mlflow.tracking  # noqa: F401

    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def _client(root: Path, uri: str, tracking: TrackingConfig) -> MlflowClient:
    """Open the store, creating the database if there is none."""
    from mlflow.tracking import MlflowClient

    path = database(uri)
    if path is None:
        return MlflowClient(uri, uri)
    if is_new(path):
        # Under another name until it is whole: a process killed here leaves no half database.
        fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        MlflowClient(f"sqlite:///{fresh}", f"sqlite:///{fresh}").search_experiments()
        fresh.replace(path)
    prepare(path, artifacts_uri(root) if tracking.uri is None else None)
    return MlflowClient(uri, uri)


def _experiment(
    client: MlflowClient, root: Path, uri: str, name: str, records: Sequence[Record]
) -> str:
    """Return the id of the experiment, created if need be, with views that show ``records``.

    TrackingError if it was deleted.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        place = artifacts_uri(root) if database(uri) else None
        experiment = client.get_experiment(client.create_experiment(name, place))
    if experiment.lifecycle_stage != "active":
        raise TrackingError(
            uri, f"tracking.experiment_name={name!r} was deleted there",
            "Restore it (mlflow experiments restore) or choose another name.",
        )  # fmt: skip
    for tag, value in tracking_columns.new_tags(records, experiment.tags).items():
        client.set_experiment_tag(experiment.experiment_id, tag, value)
    return experiment.experiment_id


def _put_sweep(
    client: MlflowClient, experiment: str, root: Path, sweep: Sweep, records: Sequence[Record]
) -> tuple[str, dict[str, str]]:
    """Return the parent's run id and the children's by record key, all complete."""
    query = f"tags.`gear.jobset` = '{sweep.jobset}'"
    found = client.search_runs([experiment], query, max_results=50_000)
    runs = {run.data.tags.get("gear.key", ""): run for run in found}
    parent = _put(client, experiment, tracking_runs.sweep_run(sweep, records, root), runs)
    names = labels([record["config"] for record in records])
    views = [
        tracking_runs.job_run(sweep, record, name, root, parent)
        for record, name in zip(records, names, strict=True)
    ]
    ids = {view.key: _put(client, experiment, view, runs) for view in views}
    for record in records:
        if record["mlflow_run_id"] is None:
            store.set_run_id(root, record["key"], ids[record["key"]])
    return parent, ids


def _put(client: MlflowClient, experiment: str, view: RunView, runs: dict[str, Run]) -> str:
    """Return the id of the view's run: as it is, or created or completed.

    The tags come after the files and the status last, so a run cut short is seen as such.
    """
    run = runs.get(view.key)
    if run is not None and _is_complete(run, view):
        return run.info.run_id
    if run is None:
        found_by = {k: v for k, v in view.tags.items() if k in ("gear.jobset", "gear.key")}
        run = client.create_run(experiment, view.start, found_by, view.name)
    run_id = run.info.run_id
    with tempfile.TemporaryDirectory() as folder:
        tags = {**view.tags, **view.write(Path(folder))}
        client.log_artifacts(run_id, folder)
    client.log_inputs(run_id, _inputs(view))
    _log(client, run, view, tags)
    client.set_terminated(run_id, view.status, view.end)
    return run_id


def _is_complete(run: Run, view: RunView) -> bool:
    """Tell whether a run shows the view's records under its parent; what people add may stay."""
    same = all(run.data.tags.get(k) == view.tags.get(k) for k in ("gear.record", "gear.parent"))
    return same and run.info.status == view.status


def _log(client: MlflowClient, run: Run, view: RunView, all_tags: dict[str, str]) -> None:
    """Log metrics, parameters and tags in one call, more only for parameters beyond a call's.

    A parameter the run has already stays: MLflow refuses to change one.
    """
    from mlflow.entities import Metric, Param, RunTag

    metrics = [Metric(k, v, view.end, 0) for k, v in view.metrics.items()]
    params = [Param(k, v) for k, v in view.params.items() if k not in run.data.params]
    tags = [RunTag(k, v[:TAG_LENGTH]) for k, v in all_tags.items()]
    run_id = run.info.run_id
    for first in range(PARAMS_PER_CALL, len(params), PARAMS_PER_CALL):
        client.log_batch(run_id, params=params[first : first + PARAMS_PER_CALL])
    client.log_batch(run_id, metrics, params[:PARAMS_PER_CALL], tags)


def _inputs(view: RunView) -> list[DatasetInput]:
    """Return the datasets by name and content hash; the texts themselves stay out."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    return [
        DatasetInput(
            Dataset(
                name=dataset["name"],
                digest=dataset["content_hash"][:DIGEST_LENGTH],
                source_type=dataset["source"],
                source=json.dumps(dataset),
                profile=json.dumps({"num_documents": dataset.get("n_documents")}),
            ),
            [InputTag("mlflow.data.context", "eval")],
        )
        for dataset in view.datasets
    ]
