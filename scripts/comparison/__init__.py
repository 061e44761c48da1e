"""What scripts/compare_veloxquant.py measures: this package's methods beside veloxquant-mlx's.

Importing this package loads an optimised BLAS, which has to happen before MLX is imported. Only
`theirs` touches veloxquant-mlx, and only when it is asked to measure.
"""

from evals.blas import load_optimised_blas

BLAS = load_optimised_blas()
