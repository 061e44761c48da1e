"""What the CUDA build is told is in place before MLX loads, and a user's own value stays."""

from __future__ import annotations

import os
import subprocess
import sys

from gear import cuda_environment

CODE = """
import os, sys
from gear import cuda_environment
cuda_environment.set_up()
assert "mlx.core" not in sys.modules
print(*(os.environ[name] for name in cuda_environment.SETTINGS))
"""


def test_it_is_set_without_mlx_and_a_users_value_stays() -> None:
    names = list(cuda_environment.SETTINGS)
    environment = {k: v for k, v in os.environ.items() if k not in names}
    for own, expected in (
        ({}, list(cuda_environment.SETTINGS.values())),
        ({names[1]: "17"}, ["0", "17", "0"]),
    ):
        done = subprocess.run(  # noqa: S603 (our own code)
            [sys.executable, "-c", CODE], env={**environment, **own}, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout.split() == expected
