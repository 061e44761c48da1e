"""The benches of scripts/bench.py, one module each with ``run(options) -> rows``.

Importing this package loads an optimised BLAS, which has to happen before MLX is imported. All but
`sweep` need only mlx, mlx-lm, numpy and rich, so that they run on a machine without the harness.
"""

from evals.blas import load_optimised_blas

BLAS = load_optimised_blas()
