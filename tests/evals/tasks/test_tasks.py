"""Choosing a task: every name in the table loads, impossible combinations are refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict

import pytest

from evals.schema import EvalConfig
from evals.tasks import TASKS, EvalError, check_settings, make_task


@pytest.mark.parametrize("name", TASKS)
def test_every_task_of_the_table_has_both_methods(name):
    task = make_task({"eval": asdict(EvalConfig(name=name, task=name))})
    assert callable(task.samples)
    assert callable(task.metrics)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"protocol": "prefix", "prefill_tokens": 0}, "eval.prefill_tokens=0"),
        ({"task": "reconstruction", "prefill_tokens": 0}, "eval.prefill_tokens=0"),
        ({"task": "reconstruction", "prefill": "streaming"}, "eval.prefill='streaming'"),
        ({"protocol": "prefix", "chunk": 16}, "eval.chunk=16"),
        ({"protocol": "oneshot", "chunk": 16}, "eval.chunk=16"),
    ],
)
def test_combinations_that_cannot_run_are_refused(settings, field):
    with pytest.raises(EvalError, match=field):
        make_task({"eval": asdict(EvalConfig(name="x", **settings))})


def test_decode_may_ask_for_no_prefill_and_its_own_chunk():
    check_settings(EvalConfig(name="decode", prefill_tokens=0, chunk=16))


def test_checking_settings_loads_no_mlx():
    code = "import sys, evals.tasks; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603
