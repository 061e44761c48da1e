"""PortCache: a `GearCache` with the counters of VeloxQuant-MLX, and V exact where that is asked.

How much of the base's error L·R and S take away is measured as each block is formed: nothing keeps
the exact tokens. Counters are computed from what is held, so trimming and loading keep them right.
"""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np

from gear.batch import BatchGearCache
from gear.block import Block
from gear.bytes import CacheBytes, block_terms
from gear.cache import GearCache
from gear.codec import compress, compress_pair
from gear.config import LayerSettings, SettingError
from gear.errors import NonFiniteError
from gear.segments import accounted_bytes
from gear.state import restore

_FIELDS = {"codes": "bits", "scales": "group_size", "lowrank": "rank", "outliers": "sparse_frac"}
"""The setting that each term's bytes follow from."""


def refuse_port_block(settings: LayerSettings, side: str, head_dim: int) -> None:
    """Raise where a block of n_b tokens would cost fp16's bytes, naming its largest term."""
    s = settings.k if side == "k" else settings.v
    rank = settings.max_rank if s.rank is None else s.rank
    n_b, stage = settings.n_b, settings.outlier_stage
    terms = block_terms(side, s, stage, 1, n_b, head_dim, rank)
    cost = 8 * sum(terms.values()) / (n_b * head_dim)
    if cost >= 16:
        name = _FIELDS[max(terms, key=lambda term: terms[term])]
        port_name = "gear_sparse_fraction" if name == "sparse_frac" else f"gear_{name}"
        raise SettingError(
            port_name, getattr(s, name),
            f"such that a block of {n_b} tokens of head_dim {head_dim} costs less than fp16 "
            f"({side.upper()}: {cost:.1f} bits per element against 16)",
            "Lower gear_rank, gear_bits or gear_sparse_fraction, or raise gear_group_size.",
        )  # fmt: skip


class ExactBlock(Block):
    """Tokens of one side that stay as they are: ``arrays["exact"]`` [batch, heads, tokens, D]."""

    @classmethod
    def of(cls, x: mx.array, settings: LayerSettings, layer: int) -> ExactBlock:
        """Keep V x [batch, heads, tokens, head_dim]. Errors: `NonFiniteError`."""
        if not mx.isfinite(x).all().item():
            raise NonFiniteError.found(x, "v", layer)
        arrays = {"exact": mx.contiguous(x)}
        return cls("v", settings.v, x.shape[2], x.shape[3], rank=0, count=1, arrays=arrays)

    @property
    def packed(self) -> bool:
        """Whether there are codes."""
        return False

    @property
    def cut_unit(self) -> int | None:
        """Where a block may be cut: nowhere, exact tokens are no load to a tile."""
        return None

    def terms(self) -> dict[str, int]:
        """Return the bytes at 2 an element, whatever the dtype."""
        return {"exact": 2 * self.arrays["exact"].size}

    def reconstruct(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """Return the tokens."""
        return self.arrays["exact"].astype(dtype)


def _squared_errors(block: Block, keys: mx.array) -> list[float]:
    """Return the squared errors of the base alone and of all three terms of a K block."""
    exact = keys.astype(mx.float32)
    # relative to the largest entry, so that no square leaves fp32
    peak = mx.maximum(mx.abs(exact).max(), 1e-37)
    base = (block.base() - exact.swapaxes(-1, -2)[:, :, None]) / peak
    full = (block.reconstruct() - exact) / peak
    sums = np.array(mx.stack([(miss * miss).sum() for miss in (base, full)]), dtype=np.float64)
    return (sums * np.float64(peak) ** 2).tolist()


class PortCache(GearCache):
    """A `GearCache` with the port's counters; bytes of K and V are those of all tokens held.

    ``exact_values`` leaves V as it is, charged in full. What is exact (sinks, buffer, such V) is
    charged at 2 bytes an element in all three counts.
    """

    def __init__(
        self, settings: LayerSettings, layer: int = -1, *, exact_values: bool = False
    ) -> None:
        super().__init__(settings, layer)
        self.exact_values = exact_values
        self.errors: list[list[float]] = []  # of each K block: squared error of base, of all terms

    def _check_cost(self, keys: mx.array, values: mx.array) -> None:
        refuse_port_block(self.settings, "k", keys.shape[3])
        if not self.exact_values:
            refuse_port_block(self.settings, "v", values.shape[3])

    def compress_oldest(self, n: int) -> tuple[Block, Block]:
        """Take the oldest ``n`` tokens as blocks, noting how far K is off with and without L·R, S.

        It is measured here because nothing keeps the exact tokens.
        """
        keys, values = self.buffer.take(n)
        s, layer = self.settings, self.layer
        if self.exact_values:
            exact = ExactBlock.of(values, s, layer)
            rank = s.k.rank if self.prefill else s.k.rank_decode
            blocks = compress(keys, "k", s.k, s, rank, layer), exact
        else:
            blocks = compress_pair(keys, values, s, self.prefill, layer)
        self.errors.append(_squared_errors(blocks[0], keys))
        return blocks

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens, and the errors of the blocks that are gone."""
        trimmed = super().trim(n)
        del self.errors[sum(s.k.count for s in self.segments) :]
        return trimmed

    # -- counters --------------------------------------------------------------------------

    def _counts(self, side: str) -> tuple[int, int, int]:
        """Return the bytes of K ("k") or V as compressed, by the base alone, and as fp16."""
        index = "kv".index(side)
        exact = 2 * sum(t.arrays[index].size for t in (self.sinks, self.buffer) if t.arrays)
        total, base, fp16 = exact, exact, exact
        for segment in self.segments:
            block = segment.v if index else segment.k
            terms = block.terms()
            total += sum(terms.values())
            base += sum(terms.get(name, 0) for name in ("codes", "scales", "exact"))
            fp16 += 2 * block.batch * self.heads * segment.valid * block.head_dim
        return total, base, fp16

    @property
    def compressed_key_bytes(self) -> int:
        """Bytes of K: base, L·R and S of its blocks, and its exact tokens."""
        return self._counts("k")[0]

    @property
    def base_only_key_bytes(self) -> int:
        """Bytes of K if its blocks were the base alone."""
        return self._counts("k")[1]

    @property
    def fp16_key_bytes(self) -> int:
        """Bytes of the same K at 2 an element."""
        return self._counts("k")[2]

    @property
    def compressed_value_bytes(self) -> int:
        """Bytes of V; all of fp16's where V stays exact."""
        return self._counts("v")[0]

    @property
    def base_only_value_bytes(self) -> int:
        """Bytes of V if its blocks were the base alone."""
        return self._counts("v")[1]

    @property
    def fp16_value_bytes(self) -> int:
        """Bytes of the same V at 2 an element."""
        return self._counts("v")[2]

    @property
    def assigned_avg_bits(self) -> float:
        """Bits stored per element of K (fp16: 16); the code bits while nothing is held."""
        total, _, fp16 = self._counts("k")
        return 16 * total / fp16 if fp16 else float(self.settings.k.bits)

    @property
    def error_recovery_ratio(self) -> float:
        """Share of the base's squared error in K that L·R and S take away, in [0, 1]."""
        base, full = (sum(pair[i] for pair in self.errors) for i in (0, 1))
        return min(max(1 - full / base, 0.0), 1.0) if base else 0.0

    def cache_bytes(self) -> CacheBytes:
        """Return what is held; V that stays exact counts with the exact tokens."""
        if not self.exact_values:
            return super().cache_bytes()
        out = CacheBytes(tokens=self.offset, tokens_compressed=self.tokens_compressed)
        out.held = self.sinks.nbytes + self.buffer.nbytes
        out.buffer = 2 * (self.sinks.elements + self.buffer.elements)
        for segment in self.segments:
            out.held += segment.nbytes
            size = accounted_bytes(segment.k, self.settings.outlier_stage, self.heads)
            out.prefill += size if segment.prefill else 0
            out.generated += 0 if segment.prefill else size
            out.buffer += segment.v.terms()["exact"]
            for term, held in segment.k.terms().items():
                out.terms[term] += held
        out.accounted = out.prefill + out.generated
        out.terms["exact"] = out.buffer
        out.fp16 = self.fp16_key_bytes + self.fp16_value_bytes
        return out

    # -- saving, batching ------------------------------------------------------------------

    @property
    def state(self) -> list[Any]:
        """The whole cache as [version, JSON, JSON of what is the port's, arrays…]."""
        version, scalars, *arrays = super().state
        own = json.dumps({"exact_values": self.exact_values, "errors": self.errors})
        return [version, scalars, own, *arrays]

    @state.setter
    def state(self, state: list[Any]) -> None:
        restore(self, [*state[:2], *state[3:]])
        own = json.loads(state[2])
        self.exact_values, self.errors = own["exact_values"], own["errors"]
        if self.exact_values:
            for segment in self.segments:
                segment.v = ExactBlock(**vars(segment.v))

    @classmethod
    def merge(cls, caches: list[GearCache]) -> BatchPortCache:
        """Return one batched cache whose rows are ``caches`` (empty ones too)."""
        return BatchPortCache(caches)


class BatchPortCache(BatchGearCache):
    """A batch of `PortCache` rows; each compresses by itself, to keep its own counters."""

    row_class = PortCache
    one_pass = False
