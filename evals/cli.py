"""The command line: help, then every job composed and checked, then Hydra launches them.

Order matters. Hydra instantiates what a config names before it calls a task function, so the whole
sweep is checked first; the task function returns a record and never raises for a failed job, so
launchers go on; the exit code is set after ``hydra.main`` returns. This process never loads MLX.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from omegaconf import DictConfig

    from evals.compose import Plan
    from evals.runner import Session

USAGE_ERROR, INTERRUPTED, TERMINATED = 2, 130, 143
BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
OBJECTIVE = "fidelity/kl_mean"
THREADS = "OMP_NUM_THREADS"


class _Terminated(KeyboardInterrupt):
    """SIGTERM, taken like Ctrl-C so that everything is closed in order."""


class Task:
    """Hydra's task function: runs one job in the sweep's session and returns its objective.

    A launcher that pickles it for a process of its own leaves the session behind: there each job
    has a session to itself in the same results root, and the sweep's session finds the records by
    their keys. ``threads`` is the command's OMP_NUM_THREADS, which Ray would set to 1: sums by
    another number of threads are others in the last digits.
    """

    def __init__(
        self,
        session: Session | None = None,
        root: Path | None = None,
        threads: str | None = None,
    ) -> None:
        self.session = session
        self.root = session.root if session is not None else root
        self.threads = threads

    def __reduce__(self) -> tuple[type[Task], tuple[None, Path | None, str | None]]:
        """Pickle without the session."""
        return Task, (None, self.root, os.environ.get(THREADS))

    def __call__(self, cfg: DictConfig) -> float | None:
        """Run the job ``cfg``; return its mean KL from fp16, None where it failed or has none.

        OSError, for the launcher to carry home, where a process of its own could not keep or share
        the record.
        """
        from hydra.core.hydra_config import HydraConfig

        from evals import launching
        from evals.compose import job_words, to_config
        from evals.record import results_root
        from evals.runner import Session

        hydra = HydraConfig.get()
        config, words = to_config(cfg), job_words(hydra.overrides)
        if self.session is not None:
            record = self.session.run(config, words)
        else:
            os.environ.pop(THREADS, None)
            os.environ |= {} if self.threads is None else {THREADS: self.threads}
            root, launcher = self.root or results_root(), launching.option(hydra)
            with Session(root, [], [config], launcher) as session:
                record = session.run(config, words)
            # the sweep's own process finds out by itself that a calibration is missing
            refused = [r["error"]["message"] for r in session.refused if not r["config"]]
            problems = [*refused, *session.unshared]
            if problems:
                raise OSError(problems[0])
        return record.get("metrics", {}).get(OBJECTIVE)


def main() -> int:
    """Run the command line in ``sys.argv``; return the exit code."""
    argv = sys.argv[1:]
    try:
        if "-h" in argv or "--help" in argv:
            from evals import help, names

            sys.stdout.write(help.text(names.conf_dir()))
            sys.stdout.flush()
            return 0
        return _main(argv)
    except KeyboardInterrupt as stop:
        _say("Stopped. Finished records are kept: the same command goes on from here.")
        return TERMINATED if isinstance(stop, _Terminated) else INTERRUPTED
    except ModuleNotFoundError as error:
        if _full_errors() or (error.name or "").startswith(("evals", "gear")):
            raise
        _say(f"{error.name} is not installed. Install this project: pip install -e '.[cpu]'")
        return USAGE_ERROR
    except BrokenPipeError:  # the reader of our output went away, as in `run.py --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if _full_errors() or not _is_usage_error(error):
            raise
        _say(f"{error}\n(HYDRA_FULL_ERROR=1 shows where it comes from.)")
        return USAGE_ERROR


def _full_errors() -> bool:
    """Tell whether stack traces were asked for."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def _is_usage_error(error: Exception) -> bool:
    """Tell whether an error is an answer to the input: ours are ValueErrors and say what to do."""
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    known = (ValueError, OSError, HydraException, OmegaConfBaseException, yaml.YAMLError)
    return isinstance(error, known)


def _say(text: str) -> None:
    """Write a message for the person to stderr."""
    sys.stderr.write(text + "\n")


def _main(argv: list[str]) -> int:
    """Check everything that ``argv`` asks for, then launch it."""
    from hydra._internal.utils import get_args_parser

    from evals import compose, dry_run, launching, validate
    from evals.record import results_root

    args = get_args_parser().parse_intermixed_args(argv)
    words = words_of(args)
    if args.shell_completion:
        return _hydra(argv, Task())
    if dry_run.asked(words) and not args.cfg:
        sweep = ["hydra.mode=MULTIRUN"] if args.multirun else []
        sys.stdout.write(dry_run.show([*words, *sweep], results_root()))
        return 0
    plan = compose.plan(words, args.multirun)
    if args.cfg or args.info or args.hydra_help:
        return _hydra(_shown(args, words), Task())
    for warning in [*validate.check_plan(plan), *launching.check(plan)]:
        _say(f"WARNING: {warning}")
    dry_run.check([config.job.dry_run for config in plan.configs])
    _require_mlx()
    return _launch(plan, words, argv)


def words_of(args: Namespace) -> list[str]:
    """Return the overrides; a folder given by ``--config-dir`` becomes one of them."""
    for flag in ("config_path", "config_name", "experimental_rerun"):
        if getattr(args, flag) is not None:
            raise ValueError(
                f"--{flag.replace('_', '-')}: not used here. Add your own YAML files with"
                " --config-dir FOLDER (FOLDER/experiment/NAME.yaml, FOLDER/model/NAME.yaml, …)."
            )
    words = list(args.overrides)
    if args.config_dir is not None:
        folder = Path(args.config_dir).resolve()
        if not folder.is_dir():
            raise ValueError(f"--config-dir {args.config_dir}: there is no such folder.")
        words.append(f'hydra.searchpath=["file://{folder}"]')
    return words


def _shown(args: Namespace, words: list[str]) -> list[str]:
    """Return the flags that only show something, before the words that were checked.

    A ``--config-dir`` left to Hydra would win over conf/ and over Hydra's own files.
    """
    flags = {"--cfg": args.cfg, "--info": args.info, "--package": args.package}
    given = [part for flag, value in flags.items() if value for part in (flag, value)]
    switches = {"--hydra-help": args.hydra_help, "--resolve": args.resolve}
    return [*given, *(flag for flag, on in switches.items() if on), *words]


def _require_mlx() -> None:
    """Raise where MLX or its backend is missing, before a worker would die of it."""
    installed = {str(d.metadata["Name"]).lower() for d in metadata.distributions()}
    if "mlx" not in installed or not installed.intersection(BACKENDS):
        raise ValueError(
            "MLX is not installed with a backend. Linux: pip install -e '.[cpu]' (or cuda13,"
            " cuda12); macOS: pip install -e . on Apple silicon."
        )


def _hydra(argv: list[str], task: Any) -> int:
    """Hand ``argv`` to ``hydra.main``, which launches ``task`` for every job; return its exit code.

    It is not 0 where Hydra has said what ended the launcher, such as a process that was killed.
    """
    import hydra
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.utils import run_job

    from evals import launching
    from evals.compose import CONFIG_NAME
    from evals.names import conf_dir

    sys.argv = [sys.argv[0], *argv]
    run = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)(task)
    # the sweeper would compose every job once more to see that it can be: compose.plan saw
    # and the launcher would keep every job's configs to the end
    launcher = launching.ONE_BY_ONE.rpartition(".")[0]
    lean = patch(f"{launcher}.run_job", _without_configs(run_job))
    with lean, patch.object(BasicSweeper, "validate_batch_is_legal"):
        try:
            run()
        except SystemExit as end:
            if end.code != 1:  # not Hydra's
                raise
            return 1
    return 0


def _without_configs(run_job: Callable[..., Any]) -> Callable[..., Any]:
    """Return Hydra's ``run_job``, its result without the configs, which nobody reads again."""

    def lean(*args: Any, **kwargs: Any) -> Any:
        result = run_job(*args, **kwargs)
        result.cfg = result.hydra_cfg = None
        return result

    return lean


def _launch(plan: Plan, words: list[str], argv: list[str]) -> int:
    """Run the planned jobs in one session; return 0, or 1 where a job failed."""
    from evals.calibrated import CalibrationMissing
    from evals.job import build_job
    from evals.record import results_root
    from evals.runner import Session

    root = results_root()
    try:
        (root / "hydra").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"The results root {root} cannot be written ({error.strerror}). Set GEAR_MLRUNS."
        ) from error
    for config in plan.configs:
        try:
            build_job(config, root)  # reads model and data: what cannot be used is said first
        except CalibrationMissing:
            if not plan.sweep:
                raise  # in a sweep the others run, and this one fails
    _announce(plan)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # no telemetry
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with Session(root, argv, plan.configs) as session:
            launched = _hydra(["--multirun", *words] if plan.sweep else words, Task(session))
            return max(launched, session.finish())
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """Turn SIGTERM into an exception in the main thread."""
    raise _Terminated


def _announce(plan: Plan) -> None:
    """Show what was composed: the option of each group and the words typed. Terminals only."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(stderr=True)
    if not console.is_terminal:
        return
    table = Table.grid(padding=(0, 2))
    for group in ("model", "dataset", "gear", "cache", "eval", "experiment"):
        chosen = [str(job.cfg.hydra.runtime.choices.get(group)) for job in plan.jobs]
        names = [name for name in dict.fromkeys(chosen) if name != "None"]
        if names:
            table.add_row(f"[bold]{group}", escape(", ".join(names)))
    typed = [str(override.input_line) for override in plan.overrides]
    if typed:
        table.add_row("[bold]set", escape(" ".join(typed)))
    if plan.sweep:
        table.add_row("[bold]jobs", str(len(plan.jobs)))
    console.print(table)
