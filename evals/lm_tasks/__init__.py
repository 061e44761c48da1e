"""Task definitions for lm-eval: one YAML each, and the functions that they name.

lm-eval loads `extract.py` and `formats.py` by their path, beside the YAML that names them.
"""
