"""Fresh caches of one method for one model, and what all its layers hold together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gear.bytes import CacheBytes
from gear.exact import native_bytes
from gear.generation import fresh_caches
from gear.methods import Method
from gear.routing import Route


class Caches:
    """One cache per layer: the method's on plain full-attention layers, native ones elsewhere.

    ``layers`` is what a model takes as ``cache=``; ``covered`` the indices the method compresses.
    """

    def __init__(self, layers: list[Any], covered: list[int]) -> None:
        self.layers, self.covered = layers, covered

    @property
    def coverage(self) -> dict[str, int]:
        """Count the layers, those the method covers, and those whose attention is packed."""
        packed = sum(getattr(cache, "route", None) is not None for cache in self.layers)
        covered = len(self.covered)
        return {"layers": len(self.layers), "covered_layers": covered, "packed_layers": packed}

    @property
    def query_window(self) -> int:
        """The prompt's last queries that the method needs to compress it; mostly none."""
        layers = (self.layers[index] for index in self.covered)
        return max((getattr(layer, "query_window", 0) for layer in layers), default=0)

    def flush(self) -> None:
        """Compress what is due in every covered layer."""
        for index in self.covered:
            self.layers[index].flush()

    def class_names(self) -> list[str]:
        """Return each layer's cache class, by which a guard sees a swapped cache."""
        return [type(c).__name__ for c in self.layers]

    def _sizes(self) -> Iterator[tuple[bool, CacheBytes]]:
        """Yield per layer whether it is covered, and its bytes."""
        for index, cache in enumerate(self.layers):
            covered = index in self.covered
            yield covered, cache.cache_bytes() if covered else native_bytes(cache)

    def bytes(self) -> dict[str, Any]:
        """Return the bytes of all layers, by kind and by term, and per layer."""
        sizes = list(self._sizes())
        total = [size for _, size in sizes]
        covered = [size for is_covered, size in sizes if is_covered]
        return {
            "accounted_bytes": sum(s.accounted for s in total),
            "buffer_bytes": sum(s.buffer for s in total),
            "stored_bytes": sum(s.stored for s in total),
            "held_bytes": sum(s.held for s in total),
            "fp16_bytes": sum(s.fp16 for s in total),
            "prefill_bytes": sum(s.prefill for s in total),
            "generated_bytes": sum(s.generated for s in total),
            "tokens_compressed_min": min((s.tokens_compressed for s in covered), default=0),
            "terms": {t: sum(s.terms[t] for s in total) for t in CacheBytes().terms},
            "per_layer": [
                {"layer": i, "covered": is_covered, "stored_bytes": s.stored, "fp16_bytes": s.fp16}
                for i, (is_covered, s) in enumerate(sizes)
            ],
        }


def make_caches(model: Any, method: Method, route: Route | None = None) -> Caches:
    """Return fresh caches for ``model``: the method's wherever it would use a plain ``KVCache``.

    Sliding-window, SSM and chunked layers keep their own cache; see `Caches.coverage`. GEAR's
    caches on the layers of ``route`` attend to what they store.
    """
    layers = fresh_caches(model, method, route)
    return Caches(layers, [i for i, cache in enumerate(layers) if hasattr(cache, "cache_bytes")])
