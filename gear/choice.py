"""Choosing the tokens that an eviction keeps, from their scores (NumPy, on the host)."""

from __future__ import annotations

import numpy as np


def best(scores: np.ndarray, n: int) -> np.ndarray:
    """Return the places of the ``n`` highest of ``scores`` [tokens], ascending; earlier first."""
    return np.sort(np.argsort(-scores, kind="stable")[:n])


def uniform(scores: np.ndarray, budget: int) -> list[list[np.ndarray]]:
    """Return for [batch, heads, tokens] the places of each head's ``budget`` best."""
    return [[best(head, budget) for head in row] for row in scores]


def shared(scores: np.ndarray, budget: int, floor: float) -> list[list[np.ndarray]]:
    """Return for [batch, heads, tokens] the places of ``heads · budget`` tokens a row.

    Each head keeps its own floor(floor · budget) best; the rest are the best of all heads.
    """
    least = int(floor * budget)
    chosen = []
    for row in scores:
        heads, tokens = row.shape
        safe = np.zeros(row.shape, dtype=bool)
        for head in range(heads):
            safe[head, best(row[head], least)] = True
        order = np.argsort(-np.where(safe, -np.inf, row).ravel(), kind="stable")
        order = order[~safe.ravel()[order]][: heads * (budget - least)]
        keep = safe.copy()
        keep[order // tokens, order % tokens] = True
        chosen.append([np.flatnonzero(head) for head in keep])
    return chosen
