"""A session: the jobs of one command, each computed once, kept as a record, shown at the end.

The walk of a job is :meth:`Session.run`: build it; its fp16 arm first, then itself; a record that
is FINISHED is used as it is, anything else is computed by the worker under the key's file lock and
committed. A job that fails is a FAILED record, which the next session tries again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from evals import record as store
from evals import report
from evals.compose import baseline_words
from evals.environment import environment
from evals.job import Job, build_job
from evals.progress import JobBar
from evals.record import FINISHED, failure
from evals.schema import Config
from evals.tracking_store import TrackingError
from evals.worker_client import Worker

Record = dict[str, Any]


class Session:
    """Runs jobs one after another and, at the end, shows all their records.

    ``root`` is the results root, ``argv`` the command as it was typed, ``configs`` every job of it.
    A context manager: leaving it ends the worker, finished records stay.
    """

    def __init__(self, root: Path, argv: list[str], configs: list[Config]) -> None:
        self.root, self.argv, self.configs = root.resolve(), argv, configs
        self.records: dict[str, Record] = {}
        self.refused: list[Record] = []
        self._worker = Worker()
        self._console = Console(stderr=True)
        self._started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._worker.close()

    def run(self, cfg: Config, words: Sequence[str] | None = None) -> Record:
        """Return the record of one job, computed where there is none. A failed job does not raise.

        ``words`` are what composes the job alone; the record keeps them. What has no record,
        because the config cannot be used or the disk is full, is returned as a FAILED one whose
        key is None.
        """
        self._started += 1
        try:
            job = build_job(cfg, self.root)
            if job.baseline is not None:
                self._obtain(job.baseline, words if words is None else baseline_words(words))
            return self._obtain(job, words)
        except (ValueError, OSError) as error:
            return self._refuse(error)

    def _obtain(self, job: Job, words: Sequence[str] | None) -> Record:
        """Return the job's record: of this session, of an earlier one, or computed now."""
        if job.key not in self.records:
            self.records[job.key] = self._finished(job) or self._computed(job, words)
        return self.records[job.key]

    def _finished(self, job: Job) -> Record | None:
        """Return the job's record where an earlier session finished it."""
        record = store.load(self.root, job.key)
        if record is None or record["status"] != FINISHED:
            return None
        self._say(f"{self._title(job)}: done before")
        return record

    def _computed(self, job: Job, words: Sequence[str] | None) -> Record:
        """Compute and commit the job; another session that is at it now is waited for and used."""

        def waiting() -> None:
            self._say(f"{self._title(job)}: another run is computing it, waiting")

        with store.lock(self.root, job.key, waiting):
            if (record := self._finished(job)) is not None:
                return record
            record = self._measured(job)
            if words is not None:
                record["words"] = list(words)
            store.commit(self.root, job.key, record)
            return record

    def _measured(self, job: Job) -> Record:
        """Return the job's new record, FINISHED or FAILED."""
        started = _now()
        body = self._baseline_failure(job)
        if body is None:
            with JobBar(self._title(job), self._console) as bar:
                body = self._worker.run(job.spec, bar)
        return {
            "key": job.key,
            "config": job.config,
            **body,
            "environment": {**environment(), **body.get("environment", {})},
            "started": started,
            "finished": _now(),
            "mlflow_run_id": None,
        }

    def _baseline_failure(self, job: Job) -> Record | None:
        """Return a FAILED body where the fp16 arm that the job needs has failed."""
        if job.baseline is None or self.records[job.baseline.key]["status"] == FINISHED:
            return None
        error = self.records[job.baseline.key]["error"]
        reason = f"the fp16 arm it is compared with failed: {error['type']}: {error['message']}"
        return failure("BaselineFailed", reason, signal=error["signal"])

    def _refuse(self, error: Exception) -> Record:
        """Return, and keep for the end, what stands in for a record that cannot be."""
        hint = (
            " Next step: free space, set permissions, or set GEAR_MLRUNS to another results root."
        )
        message = f"{error}.{hint}" if isinstance(error, OSError) else str(error)
        refused = {"key": None, "config": {}, **failure(type(error).__name__, message)}
        self.refused.append(refused)
        return refused

    def finish(self) -> int:
        """Show the records in MLflow and on stdout; return the exit code, 1 if anything failed."""
        self._collect()
        records = list(self.records.values())
        view, problem = self._tracked(records)
        if records:
            report.print_results(records, view, Console())
        for text in [*(refused["error"]["message"] for refused in self.refused), *problem]:
            self._console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        failed = any(record["status"] != FINISHED for record in records)
        return int(bool(failed or self.refused or problem))

    def _collect(self) -> None:
        """Take in the records of jobs that a launcher ran in processes of their own."""
        if self._started == len(self.configs):
            return
        for cfg in self.configs:
            try:
                job = build_job(cfg, self.root)
            except (ValueError, OSError) as error:
                self._refuse(error)
                continue
            for arm in filter(None, (job.baseline, job)):
                if arm.key not in self.records and (found := store.load(self.root, arm.key)):
                    self.records[arm.key] = found
            if job.key not in self.records:
                self._refuse(ValueError(f"{job.title} · {job.key[:8]}: its process left no record"))

    def _tracked(self, records: list[Record]) -> tuple[Any, list[str]]:
        """Return the records' view in MLflow, or None, and what went wrong."""
        tracking = self.configs[0].tracking
        if not records or not tracking.enabled:
            return None, []
        from evals.tracking import log_sweep  # late: MLflow takes seconds to import

        try:
            return log_sweep(self.root, records, self.argv, tracking), []
        except TrackingError as error:
            return None, [str(error)]

    def _title(self, job: Job) -> str:
        """Return the job as a person knows it."""
        return f"[{self._started}/{len(self.configs)}] {job.title} · {job.key[:8]}"

    def _say(self, text: str) -> None:
        """Print a line where a person is looking."""
        if self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _now() -> str:
    """Return the time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
