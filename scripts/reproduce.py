"""Run a record's job again and compare (see evals/reproduce.py)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals.reproduce import main

if __name__ == "__main__":
    sys.exit(main())
