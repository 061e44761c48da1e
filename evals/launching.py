"""Launchers that run the jobs of a sweep side by side: joblib, submitit (SLURM) and Ray.

Hydra's own launcher runs one job after another in this process. The others give each job a process
somewhere, which has a session and a worker to itself and leaves a record in the results root; the
command that started them collects the records and alone writes to MLflow. What such a job cannot
do is measure time: others use the machine while it runs. No MLX.
"""

from __future__ import annotations

from typing import Any

from evals.compose import Plan
from evals.names import ConfigError

ONE_BY_ONE = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
TIMED = ("efficiency",)
"""Tasks whose result is a time."""
SPEEDS = "speed/"


def option(hydra: Any) -> str:
    """Return the option of ``hydra/launcher`` in Hydra's node."""
    return str(hydra.runtime.choices["hydra/launcher"])


def check(plan: Plan) -> list[str]:
    """Return what to warn of. ConfigError where the launcher must not run a job."""
    hydra = plan.jobs[0].cfg.hydra
    if not plan.sweep or hydra.launcher["_target_"] == ONE_BY_ONE:
        return []
    name = option(hydra)
    timed = sorted({config.eval.task for config in plan.configs}.intersection(TIMED))
    if timed:
        raise ConfigError(
            f"hydra/launcher={name}: eval.task={', '.join(timed)} measures time, and jobs that run"
            " side by side on a device measure each other. Leave hydra/launcher= out: then one"
            " job runs after another."
        )
    warnings = [f"hydra/launcher={name}: jobs run side by side, so their records hold no speeds."]
    if any(config.job.fail_fast for config in plan.configs):
        warnings.append(
            f"job.fail_fast=true: with hydra/launcher={name} the rest run all the same."
        )
    return warnings


def untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that stay true beside other jobs: all but the speeds."""
    return {name: value for name, value in metrics.items() if not name.startswith(SPEEDS)}
