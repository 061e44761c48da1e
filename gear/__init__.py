"""GEAR on MLX: X ~= Quant_b(X) + L·R + S (arXiv:2403.05527), as codec and as K/V cache.

Axis vocabulary, used in every docstring: ``batch, heads, tokens, head_dim, groups, group, rank,
nnz``; ``rows`` and ``cols`` are head_dim and tokens for K, tokens and head_dim for V. Compute in
fp32, store in fp16. Importing this package loads no MLX: its array parts load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gear.block import Block
    from gear.cache import GearCache
    from gear.codec import compress
    from gear.config import GearConfig, SettingError, resolve
    from gear.errors import NonFiniteError
    from gear.state import load_prompt_cache

_HOMES = {
    "Block": "gear.block",
    "GearCache": "gear.cache",
    "GearConfig": "gear.config",
    "NonFiniteError": "gear.errors",
    "SettingError": "gear.config",
    "compress": "gear.codec",
    "load_prompt_cache": "gear.state",
    "resolve": "gear.config",
}

__all__ = [
    "Block",
    "GearCache",
    "GearConfig",
    "NonFiniteError",
    "SettingError",
    "compress",
    "load_prompt_cache",
    "resolve",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gear' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)
