"""The command line with the session replaced: what runs, what is refused, exit codes."""

import logging
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from evals import cli, runner
from evals.calibrated import CalibrationMissing
from evals.schema import Config


class FakeSession:
    """Remembers what it was asked to run; ``outcome`` is called for each job."""

    made: ClassVar[list["FakeSession"]] = []
    outcome: ClassVar[Any] = None

    def __init__(
        self, root: Path, argv: list[str], configs: list[Config], launcher: str | None = None
    ) -> None:
        self.root, self.argv, self.configs, self.launcher = root, argv, configs, launcher
        self.refused: list[Any] = []
        self.unshared: list[str] = []
        self.ran: list[Config] = []
        self.words: list[list[str]] = []
        self.closed = False
        self.made.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.closed = True

    def run(self, cfg: Config, words: list[str]) -> dict[str, Any]:
        self.ran.append(cfg)
        self.words.append(words)
        if FakeSession.outcome is not None:
            FakeSession.outcome()
        return {"status": "FINISHED", "metrics": {"fidelity/kl_mean": 0.25}}

    def finish(self) -> int:
        return 1


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeSession]:
    """Replace the session and the reading of models; the results root is a temporary folder."""
    monkeypatch.setattr(runner, "Session", FakeSession)
    monkeypatch.setattr("evals.job.build_job", lambda cfg, root: None)
    monkeypatch.setattr(FakeSession, "made", [])
    monkeypatch.setattr(FakeSession, "outcome", None)
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path / "mlruns"))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return FakeSession.made


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    return cli.main()


def test_one_job(sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "model=tiny", "cache=kivi") == 1  # what finish() returns
    [session] = sessions
    assert session.closed
    assert session.ran == session.configs
    assert session.argv == ["model=tiny", "cache=kivi"]
    assert session.ran[0].cache["name"] == "kivi"


def test_a_sweep_runs_every_planned_job_in_order(
    sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(monkeypatch, "gear.rank=4,8", "-m", "cache=kivi,gear") == 1  # words around -m
    [session] = sessions
    assert session.ran == session.configs
    assert [c.gear.rank for c in session.ran] == [4, 4, 8, 8]
    assert session.words[1] == ["gear.rank=4", "cache=gear"]
    assert not any(path.suffix == ".log" for path in session.root.rglob("*"))
    assert {path.name for path in session.root.iterdir()} == {"hydra"}


def test_an_experiment_in_a_folder_of_ones_own(
    sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own, too/experiment").mkdir(parents=True)
    (tmp_path / "own, too/experiment/mine.yaml").write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"
        "      gear.rank: 1,2,3\n",
        encoding="utf-8",
    )
    call(monkeypatch, "--config-dir", str(tmp_path / "own, too"), "experiment=mine")
    assert [c.gear.rank for c in sessions[0].ran] == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["gear.rnak=8"], "Did you mean gear.rank?"),
        (["gear.rank=4,9,-1", "-m"], "gear.rank=-1: must be an integer of at least 0"),
        (["gear.rank=4,8"], "add -m"),
        (["gear.rank"], "gear.rank"),
        (["gear.rank=4,8", "-m", "eval.prefill_tokens=0"], "eval.prefill_tokens=0"),
        (["+hydra.callbacks={a: {_target_: os.system}}"], "hydra.callbacks.a._target_='os.system'"),
        (["--config-dir", "/no/such/folder"], "there is no such folder"),
        (["--config-name", "other"], "--config-dir FOLDER"),
        (["--experimental-rerun", "x.pickle"], "--experimental-rerun: not used here"),
        (["--cfg", "job", "gear.rnak=8"], "Did you mean gear.rank?"),
    ],
)
def test_what_cannot_be_used_is_said_in_short_and_nothing_runs(
    words: list[str],
    answer: str,
    sessions: list[FakeSession],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, *words) == 2
    out, err = capfd.readouterr()
    assert answer in err
    assert "Traceback" not in err
    assert (out, sessions) == ("", [])


def test_a_model_or_text_that_cannot_be_read_stops_the_sweep_before_it_starts(
    sessions: list[FakeSession],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refuse(cfg: Config, root: Path) -> None:
        if cfg.seed == 2:
            raise ValueError("no weights in the folder")

    monkeypatch.setattr("evals.job.build_job", refuse)
    assert call(monkeypatch, "seed=1,2", "-m") == 2
    assert "no weights in the folder" in capfd.readouterr().err
    assert sessions == []


def test_a_calibration_that_is_not_made_yet_does_not_stop_a_sweep(
    sessions: list[FakeSession],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refuse(cfg: Config, root: Path) -> None:
        if cfg.cache["name"] == "vecinfer":
            raise CalibrationMissing("make one first")

    monkeypatch.setattr("evals.job.build_job", refuse)
    assert call(monkeypatch, "cache=vecinfer") == 2
    assert "make one first" in capfd.readouterr().err
    assert sessions == []
    assert call(monkeypatch, "cache=vecinfer,kivi", "-m") == 1
    assert [config.cache["name"] for config in sessions[0].ran] == ["vecinfer", "kivi"]


def test_stack_traces_are_there_when_asked_for(
    sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match=r"gear\.rank"):
        call(monkeypatch, "gear.rnak=8")
    assert sessions == []


def test_numbers_that_nothing_uses_are_a_loud_warning(
    sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, "cache=fp16", "gear.rank=8")
    assert "WARNING: gear.rank=8: not used by cache=fp16" in capfd.readouterr().err
    assert len(sessions) == 1


@pytest.mark.fault
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_closes_the_session_and_says_what_is_kept(
    number: signal.Signals,
    code: int,
    sessions: list[FakeSession],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(FakeSession, "outcome", lambda: os.kill(os.getpid(), number))
    assert call(monkeypatch, "seed=1,2,3", "-m") == code
    assert sessions[0].closed
    assert len(sessions[0].ran) == 1
    err = capfd.readouterr().err
    assert "Finished records are kept" in err
    assert "Traceback" not in err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.fault
def test_a_results_root_that_cannot_be_written(
    sessions: list[FakeSession],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path / "file/mlruns"))
    assert call(monkeypatch) == 2
    assert "Set GEAR_MLRUNS" in capfd.readouterr().err
    assert sessions == []


@pytest.mark.parametrize("installed", [[], ["mlx"], ["mlx-cpu"]])
def test_mlx_without_a_backend(
    installed: list[str],
    sessions: list[FakeSession],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def distributions() -> list[Any]:
        return [type("D", (), {"metadata": {"Name": name}}) for name in installed]

    monkeypatch.setattr(cli.metadata, "distributions", distributions)
    assert call(monkeypatch) == 2
    assert "'.[cpu]'" in capfd.readouterr().err
    assert sessions == []


def test_hydras_own_arguments_still_answer(
    sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # --info logs to stdout
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    assert call(monkeypatch, "--cfg", "job", "gear.rank=7") == 0
    assert "rank: 7" in capfd.readouterr().out
    assert call(monkeypatch, "--info", "searchpath") == 0
    assert sessions == []


def test_the_task_returns_the_objective_and_leaves_the_session_when_pickled(
    sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydra.core.hydra_config import HydraConfig

    from evals.compose import plan

    [job] = plan(["model=tiny"]).jobs
    root = Path("/sweep/root")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    alone = pickle.loads(pickle.dumps(cli.Task(runner.Session(root, [], []))))  # noqa: S301
    assert alone.session is None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray does
    HydraConfig.instance().set_config(job.cfg)  # as Hydra's launchers do
    assert alone(job.cfg) == 0.25
    assert "OMP_NUM_THREADS" not in os.environ
    assert sessions[-1].ran == [job.config]
    assert sessions[-1].words == [["model=tiny"]]
    assert sessions[-1].closed
    assert (sessions[-1].root, sessions[-1].launcher) == (root, "basic")  # the sweep's own root

    def refuses(config: dict[str, Any]) -> None:
        refused = {"config": config, "error": {"message": "No space left"}}
        monkeypatch.setattr(FakeSession, "outcome", lambda: sessions[-1].refused.append(refused))

    refuses({})
    with pytest.raises(OSError, match="No space left"):
        alone(job.cfg)
    refuses({"cache": "of a job that the sweep cannot build either"})
    alone(job.cfg)


def test_choices_are_shown_on_a_terminal_only(
    sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, "cache=kivi")
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    call(monkeypatch, "cache=kivi,gear", "-m")
    err = capfd.readouterr().err
    assert "smollm2" in err
    assert "kivi, gear" in err
    assert "\x1b[3" not in err  # NO_COLOR, set for all tests: bold, but no colour
