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

from evals import preflight, report
from evals import record as store
from evals.compose import baseline_words
from evals.environment import environment
from evals.job import Job, build_job
from evals.launching import untimed
from evals.progress import JobBar
from evals.record import FINISHED, failure
from evals.schema import Config
from evals.share import Share, ShareError
from evals.tracking_store import TrackingError
from evals.worker_client import LOST, Worker

Record = dict[str, Any]


class Session:
    """Runs jobs one after another and, at the end, shows all their records.

    ``root`` is the results root, ``argv`` the command as it was typed, ``configs`` every job of it,
    ``launcher`` the one that gave this process a job of a sweep, beside others.
    A context manager: leaving it ends the worker, finished records stay.
    """

    def __init__(
        self, root: Path, argv: list[str], configs: list[Config], launcher: str | None = None
    ) -> None:
        self.root, self.argv, self.configs = root.resolve(), argv, configs
        self.launcher = launcher
        url = configs[0].job.share if configs else None
        self._share = Share(url) if url else None
        self.records: dict[str, Record] = {}
        self.refused: list[Record] = []
        self.unshared: list[str] = []
        self._worker = Worker()
        # bars of several processes would overwrite each other
        self._console = Console(stderr=True, force_terminal=False if launcher else None)
        self._started = self._left_out = 0

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
        if cfg.job.fail_fast and self._failed():
            self._left_out += 1
            return {"key": None, **failure("NotRun", "job.fail_fast=true, and a job has failed")}
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
        self._give(job, again=False)
        return record

    def _computed(self, job: Job, words: Sequence[str] | None) -> Record:
        """Compute and commit the job; another session that is at it now is waited for and used."""

        def waiting() -> None:
            self._say(f"{self._title(job)}: another run is computing it, waiting")

        with store.lock(self.root, job.key, waiting):
            if (record := self._finished(job) or self._shared(job)) is not None:
                return record
            record = self._measured(job)
            if words is not None:
                record["words"] = list(words)
            store.commit(self.root, job.key, record)
            if record["status"] == FINISHED:
                self._give(job)
            return record

    def _shared(self, job: Job) -> Record | None:
        """Return the job's record where another machine shared it; it is here from then on."""
        try:
            return None if self._share is None else self._share.get(self.root, job.key)
        except ShareError as error:
            self.unshared.append(str(error))
            return None

    def _give(self, job: Job, again: bool = True) -> None:
        """Share the job's finished record, ``again`` also where there is one."""
        try:
            if self._share is not None and (again or not self._share.has(job.key)):
                self._share.put(self.root, job.key)
        except ShareError as error:
            self.unshared.append(str(error))

    def _measured(self, job: Job) -> Record:
        """Return the job's new record, FINISHED or FAILED."""
        started = _now()
        body = self._baseline_failure(job) or _too_large(job)
        beside: dict[str, Any] = {"launcher": self.launcher} if self.launcher else {}
        if body is None:
            body, attempts = self._run(job)
            beside |= {"attempts": attempts} if attempts > 1 else {}
        if self.launcher:
            body = {**body, "metrics": untimed(body["metrics"])}
        return {
            "key": job.key,
            "config": job.config,
            **({"calibration": job.calibration} if job.calibration else {}),
            **body,
            "environment": {**environment(), **body.get("environment", {}), **beside},
            "started": started,
            "finished": _now(),
            "mlflow_run_id": None,
        }

    def _run(self, job: Job) -> tuple[Record, int]:
        """Return the worker's body, and how often it took the job up: again where it was lost."""
        most, attempt = 1 + job.spec["retries"], 1
        while True:
            with JobBar(self._title(job), self._console) as bar:
                body = self._worker.run(job.spec, bar)
            lost = body["status"] != FINISHED and body["error"]["type"] == LOST
            if not lost or attempt == most:
                return body, attempt
            self._say(f"{self._title(job)}: {body['error']['message']}; run again")
            attempt += 1

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
        # what a table would show of the job, where that much of it is known
        config = getattr(error, "config", {})
        refused = {"key": None, "config": config, **failure(type(error).__name__, message)}
        self.refused.append(refused)
        return refused

    def finish(self) -> int:
        """Show the records in MLflow and on stdout; return the exit code, 1 if anything failed."""
        self._collect()
        records = list(self.records.values())
        view, problem = self._tracked(records)
        shown = [*records, *(refused for refused in self.refused if refused["config"])]
        if shown:
            report.print_results(shown, view, Console())
        told = [*(refused["error"]["message"] for refused in self.refused), *problem]
        if self._left_out:
            told.append(f"job.fail_fast=true: {self._left_out} jobs were not run.")
        for text in [*told, *dict.fromkeys(self.unshared)]:
            self._console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        return int(bool(self._failed() or problem or self.unshared))

    def _failed(self) -> bool:
        """Tell whether a job has failed, or could not be one."""
        return bool(self.refused) or any(r["status"] != FINISHED for r in self.records.values())

    def _collect(self) -> None:
        """Take in the records of jobs that a launcher ran in processes of their own."""
        if self._started == len(self.configs):
            return
        for cfg in self.configs:
            try:
                self._take_in(build_job(cfg, self.root))
            except (ValueError, OSError) as error:
                self._refuse(error)

    def _take_in(self, job: Job) -> None:
        """Take in the records of a job and its fp16 arm. ValueError where the job left none."""
        for arm in filter(None, (job.baseline, job)):
            if arm.key not in self.records and (found := self._left(arm)):
                self.records[arm.key] = found
        if job.key not in self.records:
            raise ValueError(
                f"{job.title} · {job.key[:8]}: its process left no record. It was lost, or it"
                " still runs or waits elsewhere: the same command again runs what is missing."
            )

    def _left(self, job: Job) -> Record | None:
        """Return the record that a job left here, or shared from another machine."""
        record = store.load(self.root, job.key)
        if self._share is None or (record is not None and record["status"] == FINISHED):
            return record
        with store.lock(self.root, job.key):
            return self._shared(job) or record

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


def _too_large(job: Job) -> Record | None:
    """Return a FAILED body where the job cannot fit into memory."""
    message = preflight.refusal(job.spec)
    return None if message is None else failure("TooLarge", message)


def _now() -> str:
    """Return the time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
