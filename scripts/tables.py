"""The paper's table of an experiment, from its records (see evals/table_command.py)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals.table_command import main

if __name__ == "__main__":
    sys.exit(main())
