"""Read the answers of finished downstream runs again, without the model (see evals/rescore.py)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals.rescore import main

if __name__ == "__main__":
    sys.exit(main())
