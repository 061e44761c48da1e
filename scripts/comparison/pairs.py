"""Which method of ours is held against which of theirs, at which settings.

Settings are equal where both have them: bits, group, rank, share of outliers, budget. Sinks and
recent windows are off in both, so that every token is compressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from comparison import theirs

TOKENS = 1280
"""Whole blocks for every n_b here, and old enough for all of agetiered's tiers."""
GROUP, RANK, SPARSE, BUDGET, HEAD_DIM = 32, 4, 0.02, 320, 64


@dataclass(frozen=True)
class Pair:
    """One row: ``options`` and ``gear`` are ours, ``theirs`` measures theirs."""

    method: str
    setting: str
    theirs: theirs.Measure
    options: dict[str, Any] = field(default_factory=dict)
    gear: dict[str, Any] = field(default_factory=dict)


def pairs() -> Iterator[Pair]:
    """Yield every pair, by method."""
    yield from _grids()
    yield from _gear()
    yield from _rotations()
    yield from _subspaces()
    yield from _others()


def _grids() -> Iterator[Pair]:
    """kivi, kvquant, skvq and cachegen: codes of fixed width."""
    for b in (2, 3, 4):
        own = theirs.cache("kivi", "KIVIOptions", bit_width_inlier=b, residual_length=0,
                           kivi_group_size=GROUP)  # fmt: skip
        yield Pair("kivi", f"{b} bits", own, gear={"bits": b, "group_size": GROUP})
    for b in (2, 3, 4):
        own = theirs.cache("kvquant", "KVQuantOptions", kvquant_bits=b, kvquant_n_sink=0)
        yield Pair("kvquant", f"{b} bits, 1% outliers", own, {"bits": b, "n_sink": 0})
    for b in (2, 3, 4):
        own = theirs.cache("skvq", "SKVQOptions", skvq_bits_key=b, skvq_bits_value=b,
                           skvq_group_size=GROUP, skvq_n_sink=0)  # fmt: skip
        options = {"bits": b, "group_size": GROUP, "n_sink": 0, "recent": 0}
        yield Pair("skvq", f"{b} bits", own, options)
    fixed = ("fixed_width_key_bytes", "fixed_width_value_bytes")
    for third, b in enumerate((4, 3, 2)):
        for coded, claims in (("", fixed), (", coded", ())):
            own = theirs.cache("cachegen", "CacheGenOptions", claims, cachegen_bits=b,
                               cachegen_group_size=GROUP)  # fmt: skip
            gear = {"group_size": GROUP, "n_b": 80}
            options = {"layer": (third, 3), "coded": bool(coded)}
            yield Pair("cachegen", f"{b} bits{coded}", own, options, gear)


def _gear() -> Iterator[Pair]:
    """gear, in the paper's order and in theirs, and gear_l."""
    common = {"group_size": GROUP, "rank": RANK}
    for b in (2, 3, 4):
        for method, share, stage, order in (
            ("gear", SPARSE, "pre_quant", ""),
            ("gear", SPARSE, "post_lowrank", ", S last"),
            ("gear_l", 0.0, "pre_quant", ""),
        ):
            own = theirs.cache("gear", "GEAROptions", gear_bits=b, gear_rank=RANK,
                               gear_sparse_fraction=share, gear_group_size=GROUP)  # fmt: skip
            gear = {**common, "bits": b, "sparse_frac": share, "outlier_stage": stage}
            yield Pair(method, f"{b} bits{order}", own, gear=gear)


def _rotations() -> Iterator[Pair]:
    """turboquant, turboquant_prod, qjl and rabitq: random rotations and sketches."""
    for name, kind in (
        ("turboquant", "turboquant_mse.TurboQuantMSE"),
        ("turboquant_prod", "turboquant_prod.TurboQuantProd"),
    ):
        for b in (2, 3, 4):
            width = {"jl_dim": HEAD_DIM} if name == "turboquant_prod" else {}
            own = theirs.vectors(kind.partition(".")[0], kind, True, bit_width_inlier=b, **width)
            yield Pair(name, f"{b} bits", own, {"bits": b})
    for b in (1, 2):
        own = theirs.vectors("qjl", "qjl.QJLQuantizer", False, jl_dim=b * HEAD_DIM)
        yield Pair("qjl", f"{b} signs an entry", own, {"bits": b, "group_size": GROUP})
    for clusters in (1, 64):
        yield Pair("rabitq", f"1 bit, their nlist={clusters}", theirs.rabitq(clusters))


def _subspaces() -> Iterator[Pair]:
    """svdq and palu: latents of an SVD."""
    claims = ("compressed_key_bytes", "value_fp16_bytes")
    own = theirs.cache("svdq", "SVDqOptions", claims, svdq_rank=HEAD_DIM)
    yield Pair("svdq", "8,4,2,1,1,0,0,0 bits", own)
    for b in (2, 4):
        own = theirs.cache(
            "palu", "PALUOptions", palu_rank=HEAD_DIM // 2, palu_n_head_groups=1, palu_hi_bit=b,
            palu_lo_bit=b, palu_group_size=GROUP,
        )  # fmt: skip
        options = {"bits": b, "latent_energy": 1.0, "most": 0.5}
        yield Pair("palu", f"half the latents, {b} bits", own, options, {"group_size": GROUP})


def _others() -> Iterator[Pair]:
    """agetiered, vecinfer, and what evicts."""
    claim = ("age_tiered_bytes", "age_tiered_bytes")
    own = theirs.cache("age_tiered", "AgeTieredKVOptions", claim, age_group_size=GROUP)
    yield Pair("agetiered", "8, 4, 2 bits from 0, 128, 1024", own, gear={"group_size": GROUP})
    own = theirs.vecinfer(8, 4, 8, 8)
    options = {"key_dims": 4, "key_code_bits": 8, "value_dims": 8, "value_code_bits": 8,
               "calibration": "fitted"}  # fmt: skip
    yield Pair("vecinfer", "8 bits for 4 of K, 8 of V", own, options)
    own = theirs.evicting("nestedkv", "NestedKVOptions", nestedkv_budget=BUDGET)
    yield Pair("nestedkv", f"{BUDGET} tokens a head", own, {"budget": BUDGET})
    own = theirs.evicting("qfilters", "QFiltersOptions", qfilters_budget=BUDGET,
                          qfilters_on_low_retention="ignore")  # fmt: skip
    yield Pair("qfilters", f"{BUDGET} tokens a head", own, {"budget": BUDGET})
