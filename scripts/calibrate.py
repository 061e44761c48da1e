"""Fit what a method needs to be calibrated, on any text that is not evaluated.

Usage: ``python scripts/calibrate.py method=vecinfer model=smollm2 dataset=file dataset.path=FILE``;
see evals/calibrate.py.
"""

import sys
from pathlib import Path

# A checkout that is not installed: the packages lie beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evals.calibrate import main

if __name__ == "__main__":
    sys.exit(main())
