"""Settings and fixtures that every test shares."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

# Before anything loads MLX, MLflow or a tokenizer: no network, no telemetry, plain output.
os.environ.update(
    MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true", HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", NO_COLOR="1",
)  # fmt: skip

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; BLAS threads would fight
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from evals.blas import load_optimised_blas

load_optimised_blas()

# Where pytest itself runs in the background, Ctrl-C is ignored and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kill-seeds", type=int, default=20, help="sweeps to kill at random (tests/faults)"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kill_seed" in metafunc.fixturenames:
        metafunc.parametrize("kill_seed", range(metafunc.config.getoption("--kill-seeds")))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests of faults have to say beyond that they passed."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    told = sorted(
        {
            value
            for r in reports
            for name, value in getattr(r, "user_properties", ())
            if name == "story"
        }
    )
    if told:
        terminalreporter.section("faults")
        for line in told:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The bundled model and its tokenizer; absent is a skip here and a failure in CI."""
    from evals import models
    from evals.schema import ModelConfig

    config = ModelConfig(name="smollm2", source="smollm2")
    try:
        info = models.describe(config, Path(tmp_path_factory.mktemp("results")))
    except models.ModelError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    return models.load(asdict(info), "float32")
