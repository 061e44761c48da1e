"""Settings that every test shares."""

from __future__ import annotations

import os

# Before anything loads MLX, MLflow or a tokenizer: no network, no telemetry, plain output.
os.environ.update(
    MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true", HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", NO_COLOR="1",
)  # fmt: skip

from evals.blas import load_optimised_blas

load_optimised_blas()
