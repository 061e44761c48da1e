"""Print what each of GEAR's settings costs, in bits per element: the README's table, computed.

    python scripts/settings_cost.py

Blocks of 1024 tokens (prefill) and n_b tokens (decode), 8 K/V heads, head_dim 128; fp16 is 16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gear.bytes import bits_per_element
from gear.config import GearConfig, resolve

PREFILL, HEADS, HEAD_DIM = 1024, 8, 128

ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("defaults (`gear_2bit`)", {}, "2 bits, groups of 64, rank 4 / 2, 2% outliers"),
    ("`bits=3`", {"bits": 3}, "one bit an element, whatever the base"),
    ("`group_size=32`", {"group_size": 32}, "32 bits a group"),
    ("`base=vector`", {"base": "vector"}, "n_b is 20: a decode block of K has few tokens a scale"),
    ("`base=affine_mlx`", {"base": "affine_mlx"}, "as grouped; its grid always holds 0"),
    ("`rank=0 rank_decode=0`", {"rank": 0, "rank_decode": 0}, "no L·R"),
    ("`rank=8`", {"rank": 8}, "prefill blocks only"),
    ("`rank_decode=4`", {"rank_decode": 4}, "decode blocks only"),
    ("`sparse_frac=0`", {"sparse_frac": 0.0}, "no S; at 2% a block of 64 tokens keeps 2 a channel"),
    ("`outlier_stage=post_lowrank`", {"outlier_stage": "post_lowrank"}, "exact count, wider index"),
    ("`factor_bits=8`", {"factor_bits": 8}, "L and R in 8 bits"),
    ("`factor_bits=4`", {"factor_bits": 4}, "L and R in 4 bits"),
    ("`outlier_bits=8`", {"outlier_bits": 8}, "16 bits a vector more, 8 an outlier less"),
    ("`scale_bits=8`", {"scale_bits": 8}, "scales and zeros in 8 bits"),
]  # fmt: skip


def costs(**settings: Any) -> list[float]:
    """Return bits per element of K and V in a prefill block, then of K and V in a decode block."""
    layer = resolve(replace(GearConfig(), **settings), 1)[0]
    out = []
    for tokens, name in ((PREFILL, "rank"), (layer.n_b, "rank_decode")):
        for side, s in (("k", layer.k), ("v", layer.v)):
            out.append(bits_per_element(side, layer, HEADS, tokens, HEAD_DIM, getattr(s, name)))
    return out


def table() -> str:
    """Return the Markdown table: the defaults' bits, then each change against them."""
    lines = [
        "| setting | K prefill | V prefill | K decode | V decode | what it buys |",
        "|---|---:|---:|---:|---:|---|",
    ]
    base = costs()
    for name, settings, note in ROWS:
        change = costs(**settings)
        cells = [
            f"{now:.2f}" if not settings else f"{now - then:+.2f}"
            for now, then in zip(change, base, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
