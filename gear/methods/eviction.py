"""What the methods have in common that keep some tokens of a prompt exactly and drop the others.

The budget is tokens a KV head on average, of the prompt: `budget`, or so many that they take the
share `budget_fraction` of the prompt's fp16 bytes, positions included. Eviction happens once, after
the prefill, and tokens that come later are kept exact beside the budget (gear/evicting.py). Stored:
K and V of the kept tokens at 2 bytes an element, and the position of each a head, 2 bytes (4 beyond
65536 tokens). A prompt within the budget is kept as it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gear.checks import SettingError, check_fraction, check_integer

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np


@dataclass
class Eviction:
    """Base of the evicting methods; a member implements `choose`."""

    budget: int = 256
    """Tokens of the prompt kept a KV head."""
    budget_fraction: float | None = None
    """Share of the prompt's fp16 bytes to keep, in (0, 1]; stands in for ``budget`` when set."""

    name: ClassVar[str]
    uses_gear: ClassVar[bool] = False
    compresses: ClassVar[bool] = True
    accounting_only: ClassVar[bool] = False
    needs_route: ClassVar[bool] = True
    """Its attention must run through an open route, whatever eval.attention says."""

    @property
    def query_window(self) -> int:
        """Queries of the prompt's end that `choose` needs; 0 = none."""
        return 0

    def choose(
        self, keys: mx.array, queries: mx.array | None, layer: int, budget: int
    ) -> list[list[np.ndarray]]:
        """Return for each row and KV head the places to keep, ascending; ``budget`` on average.

        ``keys`` [batch, kv_heads, tokens, head_dim], ``queries`` [batch, kv_heads, heads a KV head,
        n, head_dim] of the last n tokens, times the scale, or None where none are needed.
        """
        raise NotImplementedError

    def kept_tokens(self, tokens: int, token_bytes: int) -> int:
        """Return the tokens a head may keep of ``tokens``; one takes ``token_bytes`` in fp16."""
        if self.budget_fraction is None:
            return min(self.budget, tokens)
        if self.budget_fraction == 1:
            return tokens
        with_position = token_bytes + (2 if tokens <= 2**16 else 4)
        return max(int(self.budget_fraction * tokens * token_bytes / with_position), 1)

    def check(self) -> None:
        """Raise `SettingError` for settings that mean nothing."""
        check_integer("cache.budget", self.budget, 1)
        if self.budget_fraction is not None:
            check_fraction("cache.budget_fraction", self.budget_fraction)
            if self.budget_fraction == 0:
                raise SettingError("cache.budget_fraction", 0, "above 0")

    def check_window(self, name: str, value: int, least: int = 1) -> None:
        """Refuse a number of tokens that are always kept and leave the budget no choice."""
        check_integer(f"cache.{name}", value, least)
        if self.budget_fraction is None and value >= self.budget:
            allowed = f"below cache.budget={self.budget}, or nothing is left to choose"
            raise SettingError(f"cache.{name}", value, allowed)

    def plan(self, n_layers: int) -> list[dict[str, Any]]:
        """Validate, and return the options per layer; one pass over everything attends exactly."""
        self.check()
        own: dict[str, Any] = {"attend": "exact"}
        if self.budget_fraction is not None:
            own["budget"] = None
        return [{**self.saved_options(layer), **own} for layer in range(n_layers)]

    def saved_options(self, layer: int) -> dict[str, Any]:
        """Return the options as a layer's key and saved cache hold them."""
        return asdict(self)

    def check_shape(self, n_layers: int, kv_heads: int, head_dim_k: int, head_dim_v: int) -> None:
        """Accept every model."""

    def block_tokens(self) -> int | None:
        """Return None: there are no blocks."""
        return None

    def recent_tokens(self) -> int:
        """Return 0."""
        return 0

    def make_cache(self, layer: int, n_layers: int) -> Any:
        """Return a fresh evicting cache."""
        from gear.evicting import EvictingCache

        self.check()
        return EvictingCache(self, layer)
