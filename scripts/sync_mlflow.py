"""Make MLflow show every record: ``python scripts/sync_mlflow.py``.

Adds what the store lacks and changes nothing that is there, so it may run at any time; with the
database gone it makes a new one from the records.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# A checkout that is not installed: the packages lie beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evals.record import results_root
from evals.schema import TrackingConfig
from evals.tracking import sync
from evals.tracking_store import TrackingError


def main() -> int:
    """Bring the store up to date; return the exit code."""
    parser = argparse.ArgumentParser(description="Make MLflow show every record on disk.")
    parser.add_argument("--uri", help="tracking store (default: the results root's own database)")
    args = parser.parse_args()
    root = results_root()
    try:
        views = sync(root, TrackingConfig(name="mlflow", uri=args.uri))
    except TrackingError as error:
        print(error, file=sys.stderr)
        return 1
    runs = sum(len(view.run_ids) for view in views)
    print(f"{len(views)} sweeps with {runs} jobs from {root / 'records'} are in MLflow.")
    if views:
        print(views[-1].ui_command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
