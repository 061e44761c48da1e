"""Configs of a stranger: nothing that they name runs, and no secret leaves the environment.

What they name would make the canary file; the first test shows that it does without our checks.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from evals import cli

pytestmark = pytest.mark.fault

SECRET = "correct-horse-battery"  # noqa: S105 - what the tests look for
GLOBAL = "# @package _global_\n"
BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 10}]\n" for i in range(1, 10))
LOGGING = "{version: 1, root: {handlers: [h]}, handlers: {h: %s}}"

Refused = Callable[..., str]


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture(autouse=True)
def _logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back the handlers that Hydra sets: they would write to a test's closed output."""
    monkeypatch.setattr(logging.root, "handlers", list(logging.root.handlers))
    monkeypatch.setattr(logging.root, "level", logging.root.level)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SECRET", SECRET)
    return tmp_path / "runs"


@pytest.fixture
def refused(
    tmp_path: Path,
    root: Path,
    canary: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Refused:
    """Return what runs words on the folder ``own``: refused, nothing made, no secret printed."""

    def run(*words: str) -> str:
        (tmp_path / "own").mkdir(exist_ok=True)
        monkeypatch.setattr(sys, "argv", ["run.py", "--config-dir", str(tmp_path / "own"), *words])
        assert cli.main() == cli.USAGE_ERROR
        said = "".join(capsys.readouterr())
        assert SECRET not in said
        assert "Traceback" not in said
        assert not canary.exists()
        assert not root.exists()
        return said

    return run


def write(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "own" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("CANARY", str(tmp_path / "canary")), encoding="utf-8")


TARGET = "{_target_: numpy.savetxt, fname: CANARY, X: [1]}"
EXPERIMENTS = {
    "callback": (f"hydra: {{callbacks: {{x: {TARGET}}}}}", "hydra.callbacks: is not set in a file"),
    "launcher": ("hydra: {launcher: {_target_: os.system}}", "hydra.launcher._target_='os.system'"),
    "launcher_nested": (f"hydra: {{launcher: {{n_jobs: {TARGET}}}}}", "hydra.launcher"),
    "sweeper": ("hydra: {sweeper: {_target_: os.system}}", "hydra.sweeper._target_='os.system'"),
    "sweep_word": (
        f"hydra: {{sweeper: {{params: {{+hydra.callbacks.x: '{TARGET}'}}}}}}",
        r"own.yaml: hydra.callbacks.x: is not set",
    ),
    "swept_tracking": (
        "hydra: {sweeper: {params: {tracking: '{uri: https://example.org}, {}'}}}", "tracking: is",
    ),
    "cache": ("cache: {_target_: os.system}", "cache._target_='os.system'"),
    "nested": (f"cache: {{x: [{{y: {TARGET}}}]}}", "cache.x.0.y._target_"),
    "interpolated": ("cache: {_target_: '${model.name}'}", r"cache._target_='\$\{model.name\}'"),
    "base_options": (f"gear: {{base_options: {TARGET}}}", "gear.base_options._target_"),
    "aliased": (f"gear: {{base_options: &x {TARGET}}}\ncache: {{y: *x}}", "own.yaml:3: YAML alias"),
    "merged": (f"x: &x {TARGET}\ncache: {{<<: *x}}", "own.yaml:3: YAML aliases"),
    "recursive": ("cache: {_recursive_: false}", "_recursive_ is not used"),
    "convert": ("cache: {_convert_: all}", "_convert_ is not used"),
    "args": ("cache: {_args_: [CANARY]}", "_args_ is not used"),
    "partial": ("cache: {_partial_: true}", "_partial_ is not used"),
    "python_apply": ("x: !!python/object/apply:os.system [touch CANARY]", "own.yaml:2: .* Python"),
    "python_name": ("x: !!python/name:os.system", "own.yaml:2: .* Python"),
    "duplicate": ("seed: 1\nseed: 2", "own.yaml:3: the key 'seed' stands twice"),
    "bomb": (BOMB, "own.yaml:3: YAML aliases"),
    "depth": ("x: " + "[" * 5000 + "]" * 5000, "own.yaml:2: more than 40 levels"),
    "factory": (
        f"hydra: {{job_logging: {LOGGING % '{(): logging.FileHandler, filename: CANARY}'}}}",
        "factories",
    ),
    "log_file": (
        f"hydra: {{job_logging: {LOGGING % '{class: logging.FileHandler, filename: CANARY}'}}}",
        "the log file is",
    ),
    "log_property": (
        f"hydra: {{job_logging: {LOGGING % '{class: logging.FileHandler, .: {x: CANARY}}'}}}",
        "a handler has",
    ),
    "setup": ("hydra: {launcher: {setup: [touch CANARY]}}", "hydra.launcher.setup: is not set"),
    "cluster": ("hydra: {launcher: {ray: {init: {address: x}}}}", "hydra.launcher.ray: is not set"),
    "batch_script": ('hydra: {launcher: {name: "x\\ntouch CANARY"}}', "hydra.launcher.*name"),
    "run_folder": ("hydra: {run: {dir: CANARY}}", "hydra.run: is not set"),
    "sweep_folder": ("hydra: {sweep: {dir: CANARY}}", "hydra.sweep: is not set"),
    "subfolder": ("hydra: {output_subdir: CANARY}", "hydra.output_subdir: is not set"),
    "words": ("hydra: {overrides: {task: [seed=3]}}", "hydra.overrides: is not set"),
    "job_name": ("hydra: {job: {name: ../../x}}", "hydra.job: is not set"),
    "package": ("hydra: {searchpath: ['pkg://antigravity']}", "hydra.searchpath: is not set"),
    "server": ("tracking: {uri: 'https://example.org'}", "tracking.uri: is not set"),
    "traversal": ("defaults: [override /model: ../../../x]", "Could not find"),
}  # fmt: skip


def test_the_canary_lives_where_nothing_is_checked(
    root: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py"])
    target = TARGET.replace("CANARY", str(canary))
    word = f"+hydra.callbacks={{x: {target}}}"
    with pytest.warns(UserWarning, match="on_"):
        cli._hydra([word, "model=tiny", "tracking=none"], lambda cfg: None)
    assert canary.exists()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_that_names_more_than_settings(
    tmp_path: Path, refused: Refused, name: str
) -> None:
    text, answer = EXPERIMENTS[name]
    write(tmp_path, "experiment/own.yaml", GLOBAL + text + "\n")
    assert re.search(answer, refused("experiment=own"))


@pytest.mark.parametrize(
    "mode", [["-m"], ["--cfg", "all"], ["--info", "all"], ["--hydra-help"], ["job.dry_run=true"]]
)
@pytest.mark.parametrize("place", ["hydra_logging", "job_logging", "launcher"])
def test_whatever_a_command_shows_it_checks_first(
    tmp_path: Path, refused: Refused, mode: list[str], place: str
) -> None:
    text = LOGGING % "{class: logging.FileHandler, filename: CANARY}"
    write(tmp_path, f"hydra/{place}/own.yaml", TARGET if place == "launcher" else text)
    refused(*mode, f"hydra/{place}=own")


def test_hydras_own_files_cannot_be_replaced(
    tmp_path: Path, root: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = LOGGING % "{class: logging.FileHandler, filename: CANARY}"
    write(tmp_path, "hydra/hydra_logging/default.yaml", text)
    write(tmp_path, "config.yaml", "hydra: {callbacks: " + TARGET + "}")
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--hydra-help", "--config-dir", str(tmp_path / "own")]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert not canary.exists()


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("hydra.searchpath=[pkg://antigravity]", "pkg://antigravity: must be a folder"),
        ("hydra.job.name=../../x", "hydra.job.name='../../x'"),
        ("hydra.launcher=${cache}", "hydra.launcher"),
        ("experiment=../../x", "experiment=../../x: there is no such option"),
        ("model=../../x", "model=../../x: there is no such option"),
        ("hydra/launcher=../../x", "Could not find"),
        ("tracking.experiment_name=../../x", "tracking.experiment_name='../../x'"),
        ("tracking.experiment_name=/etc", "tracking.experiment_name='/etc'"),
        ("model.name='<script>'", "model.name='<script>'"),
        ("dataset.name='=cmd()'", "dataset.name='=cmd()'"),
        ("cache.name='[red]x[/]'", "cache.name='[red]x[/]'"),
        ("tracking.uri=https://me:correct-horse-battery@host", "must hold no user name"),
        ("+tracking.uri=https://me:correct-horse-battery@host", "must hold no user name"),
    ],
)
def test_a_word_that_names_a_path_a_package_or_a_secret(
    refused: Refused, word: str, answer: str
) -> None:
    assert answer in refused("model=tiny", word)


@pytest.mark.parametrize("command", ["table_command", "explain", "reproduce"])
def test_a_key_that_is_a_path_names_nothing(
    root: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert import_module(f"evals.{command}").main(["../../etc"]) in (1, 2)
    said = "".join(capsys.readouterr())
    assert "../../etc" in said
    assert not root.exists()
