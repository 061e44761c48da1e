"""qfilters: keep the keys that lie farthest along the queries' main direction (arXiv:2503.02812).

    score(k) = <k, u>,  u = top right-singular vector of the uncentred queries [n, head_dim]

a head, its sign such that the queries' mean projection is positive; the filters of the heads that
share a KV head are averaged, as in the paper. Each KV head keeps its ``budget`` best; no token is
protected, neither first nor last. Stored: see gear/methods/eviction.py.

Calibrated filters, as the paper's, come from a file of ``LAYER.k.filter`` [kv_heads, head_dim]
(``calibration``), and then no query is needed; scripts/calibrate.py fits them on 3000 queries of
another text, after RoPE, as many as the paper. Without a file u is that of the prompt's own last
``window`` queries: ours, and nothing is calibrated. The paper also evicts while it generates; here
eviction is once, after the prefill.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gear.calibration import Seen, is_auto
from gear.checks import check_integer
from gear.methods.eviction import Eviction

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np


def filters(queries: mx.array) -> np.ndarray:
    """Return u [batch, kv_heads, head_dim] of queries [batch, kv_heads, group, n, head_dim]."""
    import numpy as np

    q = np.array(queries, dtype=np.float64)
    top = np.linalg.svd(q, full_matrices=False)[2][..., 0, :]
    mean = (q.mean(axis=-2) * top).sum(axis=-1, keepdims=True)
    return np.where(mean < 0, -top, top).mean(axis=2)


@dataclass
class QFilters(Eviction):
    """Keys by their projection on a filter a head."""

    window: int = 32
    """Queries at the prompt's end that make the filter, where no file has it."""
    calibration: str = ""
    """A safetensors file of filters, or auto; "" = the prompt's own queries."""

    name: ClassVar[str] = "qfilters"
    fits_queries: ClassVar[bool] = True

    @property
    def query_window(self) -> int:
        """Return ``window``, or 0 with calibrated filters."""
        return 0 if self.calibration else self.window

    def check(self) -> None:
        """Refuse a filter of no query."""
        super().check()
        check_integer("cache.window", self.window, 1)

    def saved_options(self, layer: int) -> dict[str, Any]:
        """Return the options, the file by its content."""
        return {**asdict(self), "calibration": self._reference(layer)}

    def _reference(self, layer: int) -> str:
        """Return the reference of the layer's filters, "" without a file."""
        from gear.calibration import reference

        known = not self.calibration or self.calibration.startswith("sha256:")
        if known:  # a saved cache's
            return self.calibration
        return reference(self.calibration, layer, "k", "cache.calibration")

    def fits(self, n_layers: int) -> dict[str, Any]:
        """Return K's filters where they come from the file ``auto``; no option shapes them."""
        return {"k": {"method": self.name}} if is_auto(self.calibration) else {}

    def fit(self, layer: int, n_layers: int, seen: Seen, seed: int) -> dict[str, mx.array]:
        """Return the filters of a layer; nothing is drawn."""
        import mlx.core as mx
        import numpy as np

        if seen.queries is None:
            raise ValueError(f"cache={self.name}, layer {layer}: no queries to fit filters on.")
        q = mx.moveaxis(seen.queries, 0, 2).flatten(2, 3)  # the windows one after another
        return {"k.filter": mx.array(filters(q[None])[0].astype(np.float32))}

    def choose(
        self, keys: mx.array, queries: mx.array | None, layer: int, budget: int
    ) -> list[list[np.ndarray]]:
        """Return each head's ``budget`` keys farthest along its filter."""
        import mlx.core as mx
        import numpy as np

        from gear.choice import uniform

        if queries is None:
            u = self._calibrated(layer, keys.shape[1], keys.shape[3])
        else:
            u = mx.array(filters(queries).astype(np.float32))
        scores = (keys.astype(mx.float32) * u[..., None, :]).sum(axis=-1)
        return uniform(np.array(scores), budget)

    def _calibrated(self, layer: int, heads: int, head_dim: int) -> mx.array:
        """Return the file's filters [kv_heads, head_dim]."""
        import mlx.core as mx

        from gear.calibration import tensors

        found = tensors(self._reference(layer)).get("filter")
        if found is None or found.shape != (heads, head_dim):
            shape = None if found is None else found.shape
            raise ValueError(
                f"cache.calibration={self.calibration!r}: {layer}.k.filter must be "
                f"[{heads}, {head_dim}], got {shape}; make the file with this model."
            )
        return found.astype(mx.float32)
