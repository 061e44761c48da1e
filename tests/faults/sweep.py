"""Run a sweep of small jobs in a process that a test may kill: ``sweep.py ROOT CACHE...``."""

from __future__ import annotations

import sys
from pathlib import Path

from evals.runner import Session
from tests.evals.configs import small


def main() -> int:
    """Run one job per cache name, in the order given; return the session's exit code."""
    root, *names = sys.argv[1:]
    configs = [small(name, method="kivi") for name in names]
    with Session(Path(root), sys.argv[1:], configs) as session:
        for config in configs:
            session.run(config)
        return session.finish()


if __name__ == "__main__":
    sys.exit(main())
