"""Evaluate a language model through a compressed KV cache: ``python run.py --help``.

The one entry of a checkout; the installed command ``gear-eval`` is the same function.
"""

import sys

from evals.cli import main

if __name__ == "__main__":
    sys.exit(main())
