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
    from gear.generation import compressed
    from gear.port import (
        GEARState,
        base_only_bytes,
        gear_bytes,
        gear_compress,
        gear_quant_dequant,
        gear_reconstruct,
        gear_reconstruct_batched,
        lowrank_error,
        quantize_base,
        residual,
        sparse_outliers,
        sparse_outliers_batched,
    )
    from gear.port_cache import PortCache
    from gear.port_config import KVCacheBuilder, KVCacheConfig, KVCacheFactory
    from gear.state import load_prompt_cache

_HOMES = {
    "Block": "gear.block",
    "GEARState": "gear.port",
    "GearCache": "gear.cache",
    "GearConfig": "gear.config",
    "KVCacheBuilder": "gear.port_config",
    "KVCacheConfig": "gear.port_config",
    "KVCacheFactory": "gear.port_config",
    "NonFiniteError": "gear.errors",
    "PortCache": "gear.port_cache",
    "SettingError": "gear.config",
    "base_only_bytes": "gear.port",
    "compress": "gear.codec",
    "compressed": "gear.generation",
    "gear_bytes": "gear.port",
    "gear_compress": "gear.port",
    "gear_quant_dequant": "gear.port",
    "gear_reconstruct": "gear.port",
    "gear_reconstruct_batched": "gear.port",
    "load_prompt_cache": "gear.state",
    "lowrank_error": "gear.port",
    "quantize_base": "gear.port",
    "residual": "gear.port",
    "resolve": "gear.config",
    "sparse_outliers": "gear.port",
    "sparse_outliers_batched": "gear.port",
}

__all__ = [
    "Block",
    "GEARState",
    "GearCache",
    "GearConfig",
    "KVCacheBuilder",
    "KVCacheConfig",
    "KVCacheFactory",
    "NonFiniteError",
    "PortCache",
    "SettingError",
    "base_only_bytes",
    "compress",
    "compressed",
    "gear_bytes",
    "gear_compress",
    "gear_quant_dequant",
    "gear_reconstruct",
    "gear_reconstruct_batched",
    "load_prompt_cache",
    "lowrank_error",
    "quantize_base",
    "residual",
    "resolve",
    "sparse_outliers",
    "sparse_outliers_batched",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gear' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)
