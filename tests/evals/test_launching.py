"""Launchers that run jobs side by side: what is refused, what is warned of, what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evals import launching
from evals.compose import Plan, plan
from evals.names import ConfigError


@pytest.fixture
def ray() -> Plan:
    """A sweep of two jobs by the Ray launcher, which need not be installed."""
    sweep = plan(["model=tiny", "cache=kivi,gear"], multirun=True)
    hydra = sweep.jobs[0].cfg.hydra
    hydra.launcher["_target_"] = "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher"
    hydra.runtime.choices["hydra/launcher"] = "ray"
    return sweep


def test_hydras_own_launcher_and_a_single_job_need_nothing(ray: Plan) -> None:
    assert launching.check(plan(["model=tiny", "cache=kivi,gear"], multirun=True)) == []
    assert launching.check(replace(ray, sweep=False)) == []


def test_a_launcher_that_is_not_installed_is_named_with_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"hydra/launcher/rays(.|\n)*\[cluster\]"):
        plan(["hydra/launcher=rays"])


def test_jobs_beside_others_hold_no_speeds(ray: Plan) -> None:
    assert launching.check(ray) == [
        "hydra/launcher=ray: jobs run side by side, so their records hold no speeds."
    ]
    metrics = {"speed/decode_tok_per_s": 1.0, "mem/peak_bytes": 2.0, "kv/size_pct": 3.0}
    assert list(launching.untimed(metrics)) == ["mem/peak_bytes", "kv/size_pct"]
    ray.jobs[0].config.job.fail_fast = True
    assert "run all the same" in launching.check(ray)[1]


def test_what_measures_time_is_refused(ray: Plan) -> None:
    config = ray.jobs[1].config
    timed = replace(config, eval=replace(config.eval, task="efficiency"))
    jobs = [ray.jobs[0], replace(ray.jobs[1], config=timed)]
    with pytest.raises(ConfigError, match=r"eval.task=efficiency measures time.*Leave hydra"):
        launching.check(replace(ray, jobs=jobs))
