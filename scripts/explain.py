"""What a cell of a table is and how it is made again (see evals/explain.py)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals.explain import main

if __name__ == "__main__":
    sys.exit(main())
