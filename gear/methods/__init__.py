"""The methods that tables compare: one file each, found by name in one literal table.

A method is a dataclass of its options (what `conf/cache/NAME.yaml` may set) with the attributes of
`Method`. Adding one is a file here, a line in METHODS and a YAML in conf/cache; a quantizer has its
base in the same file and a line in gear/bases.py, and GEAR can then correct it. Importing this
package, or a method's module, loads no MLX: caches are made in the worker only.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any, ClassVar, Protocol

METHODS = {
    "fp16": "gear.methods.fp16.Fp16",
    "mlx_quant": "gear.methods.mlx_quant.MlxQuant",
    "gear": "gear.methods.gear.Gear",
    "gear_l": "gear.methods.gear_l.GearL",
    "kivi": "gear.methods.kivi.Kivi",
    "outlier_kivi": "gear.methods.outlier_kivi.OutlierKivi",
    "kcvt": "gear.methods.kcvt.Kcvt",
    "per_token": "gear.methods.per_token.PerToken",
    "kvquant": "gear.methods.kvquant.KvQuant",
    "turboquant": "gear.methods.turboquant.TurboQuant",
    "turboquant_prod": "gear.methods.turboquant_prod.TurboQuantProd",
    "qjl": "gear.methods.qjl.Qjl",
    "rabitq": "gear.methods.rabitq.Rabitq",
    "rabitq_extended": "gear.methods.rabitq.RabitqExtended",
    "skvq": "gear.methods.skvq.Skvq",
    "svdq": "gear.methods.svdq.Svdq",
    "palu": "gear.methods.palu.Palu",
    "vecinfer": "gear.methods.vecinfer.VecInfer",
    "commvq": "gear.methods.commvq.CommVq",
    "cachegen": "gear.methods.cachegen.CacheGen",
    "agetiered": "gear.methods.agetiered.AgeTiered",
    "qfilters": "gear.methods.qfilters.QFilters",
    "adakv": "gear.methods.adakv.AdaKV",
    "nestedkv": "gear.methods.nestedkv.NestedKV",
}


class Method(Protocol):
    """What the harness asks of a method.

    A cache it makes has mlx-lm's cache contract and, beside it, ``flush()``, ``reconstruct()``
    (dense K and V of all tokens), ``cache_bytes()`` and ``buffered_tokens``.
    """

    name: ClassVar[str]
    uses_gear: ClassVar[bool]
    """Takes GEAR's numbers in its one field ``settings``."""
    compresses: ClassVar[bool]
    """False for the exact cache, to which the compression guards do not apply."""
    accounting_only: ClassVar[bool]
    """Its bytes are a count, not arrays held: marked in every table."""

    def plan(self, n_layers: int) -> list[dict[str, Any]]:
        """Validate, and return the resolved settings per layer as plain values (for the key)."""
        ...

    def check_shape(self, n_layers: int, kv_heads: int, head_dim_k: int, head_dim_v: int) -> None:
        """Refuse a model for which a block would cost as much as fp16, or does not fit."""
        ...

    def block_tokens(self) -> int | None:
        """Return n_b, or None for a method without blocks."""
        ...

    def recent_tokens(self) -> int:
        """Return the newest tokens that stay exact on top of the buffer."""
        ...

    def make_cache(self, layer: int, n_layers: int) -> Any:
        """Return a fresh cache for one layer (needs MLX)."""
        ...


def load_method(target: str) -> type[Any]:
    """Return the method class for a YAML ``_target_`` such as ``gear.methods.kivi.Kivi``.

    Errors: ``ValueError`` with the nearest allowed name; nothing outside METHODS is imported.
    """
    if target not in METHODS.values():
        near = difflib.get_close_matches(str(target), list(METHODS.values()), n=1, cutoff=0.0)
        raise ValueError(
            f"cache._target_={target!r}: must be one of {', '.join(METHODS.values())}. "
            f"Did you mean {near[0]}?"
        )
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)
