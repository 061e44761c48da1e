"""Reconstruction error and bytes of GEAR, term by term, on synthetic and on real K and V.

    python scripts/bench_synthetic.py [--out results_gear.json] [--no-model]

For every preset, side and block size four reconstructions: Quant_b alone, with L·R, with S, with
both. An error is ||X - X'||_F / ||X||_F over the block; recovery is 1 - err² / err_base²; bytes are
the closed forms of gear/bytes.py, of one block without the exact sinks. Synthetic X is A·B of low
rank, noise and sparse outliers; real X comes from the bundled model (scripts/fetch_models.py).
No perplexity: `run.py` measures what an error costs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# A checkout that is not installed: the packages lie beside this folder.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from evals.blas import load_optimised_blas  # noqa: E402

BLAS = load_optimised_blas()

import mlx.core as mx  # noqa: E402 - the BLAS must be loaded before MLX
import numpy as np  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from rich.box import SIMPLE  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from evals import models  # noqa: E402
from evals.data import load_documents  # noqa: E402
from evals.environment import environment  # noqa: E402
from evals.prefill import exact_prefill  # noqa: E402
from evals.record import results_root  # noqa: E402
from evals.schema import DatasetConfig, ModelConfig  # noqa: E402
from gear.bytes import block_terms  # noqa: E402
from gear.codec import compress  # noqa: E402
from gear.config import GearConfig, LayerSettings, resolve  # noqa: E402
from gear.lowrank import low_rank  # noqa: E402

PRESETS = ("gear_2bit", "gear_4bit", "port_2bit", "gear_frontier")
VARIANTS = {"base": (False, False), "base+L·R": (True, False), "base+S": (False, True),
            "all": (True, True)}  # fmt: skip
SEED, SHAPE, RANKS, LAYERS = 0, (8, 1024, 128), (4, 8), 4
NOISE, OUTLIER_SHARE, OUTLIER_SIZE = 0.1, 0.01, 8.0
LOW_RANK_SHARE = 0.5  # of the energy: what a residual called low-rank would lose to L·R
Row = dict[str, Any]
Pair = tuple[str, dict[str, mx.array]]


def preset(name: str) -> LayerSettings:
    """Return the resolved settings of conf/gear/``name``.yaml."""
    values = OmegaConf.load(ROOT / "conf" / "gear" / f"{name}.yaml")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(GearConfig), values))
    assert isinstance(config, GearConfig)  # noqa: S101 - what a structured config turns into
    return resolve(config, 1)[0]


def synthetic() -> Iterator[Pair]:
    """Yield K and V [1, *SHAPE]: A·B / sqrt(rank) + noise, and a few entries far outside."""
    draw, (heads, tokens, head_dim) = np.random.default_rng(SEED), SHAPE
    for rank in RANKS:
        sides = {}
        for side in "kv":
            a = draw.standard_normal((1, heads, tokens, rank))
            b = draw.standard_normal((1, heads, rank, head_dim))
            noise, far = (draw.standard_normal((1, *SHAPE)) for _ in range(2))
            spots = draw.random((1, *SHAPE)) < OUTLIER_SHARE
            x = a @ b / rank**0.5 + NOISE * noise + np.where(spots, OUTLIER_SIZE * far, 0)
            sides[side] = mx.array(x.astype(np.float32))
        yield f"synthetic, rank {rank}", sides


def real() -> Iterator[Pair]:
    """Yield fp32 K and V of some layers after the first tokens, SHAPE's, of an embedded text.

    Raises :class:`evals.models.ModelError` where the model has not been fetched.
    """
    info = models.describe(ModelConfig(name="smollm2", source="smollm2"), results_root())
    model, tokenizer = models.load(asdict(info), "float32")
    document = load_documents(DatasetConfig("embedded", "embedded", limit=1), SEED)[0]
    state = exact_prefill(model, tokenizer.encode(document.text)[: SHAPE[1]], chunk=512)
    for index in np.linspace(0, info.n_layers - 1, LAYERS).astype(int):
        keys, values = state.layers[index].keys_and_values()
        yield f"{info.name}, layer {index}", {"k": keys, "v": values}


def digits(value: float) -> float:
    """Return ``value`` to six digits: more would differ between BLAS libraries."""
    return float(f"{value:.6g}")


def relative_error(exact: mx.array, rebuilt: mx.array) -> float:
    """Return ||X - X'||_F / ||X||_F over all entries, summed in fp64."""
    x = np.asarray(exact, dtype=np.float64)
    return float(np.linalg.norm(x - np.asarray(rebuilt)) / np.linalg.norm(x))


def measure(x: mx.array, side: str, layer: LayerSettings, rank: int | None) -> Row:
    """Return the errors, bytes and recoveries of one block x [1, heads, tokens, head_dim]."""
    _, heads, tokens, head_dim = x.shape
    full, stage, by_variant, base = (
        layer.k if side == "k" else layer.v,
        layer.outlier_stage,
        {},
        0.0,
    )
    terms: dict[str, int] = {}
    for name, (with_rank, with_sparse) in VARIANTS.items():
        settings = full if with_sparse else replace(full, sparse_frac=0)
        block = compress(x, side, settings, layer, rank if with_rank else 0)
        terms = block_terms(side, settings, stage, heads, tokens, head_dim, block.rank)
        error = relative_error(x, block.reconstruct())
        base = base or error  # the first variant
        size = sum(terms.values())
        by_variant[name] = {
            "rel_err": digits(error),
            "recovery": digits(1 - (error / base) ** 2) if base else 0.0,
            "accounted_bytes": size,
            "held_bytes": block.nbytes,
            "bits_per_elem": digits(8 * size / x.size),
        }
    bits = {term: digits(8 * size / x.size) for term, size in terms.items()}
    return {"shape": list(x.shape), "rank": rank, "variants": by_variant, "term_bytes": terms,
            "term_bits_per_elem": bits}  # fmt: skip


def rows_of(data: Iterator[Pair]) -> Iterator[Row]:
    """Yield a row for each preset, side and block (prefill: all; decode: the newest n_b tokens)."""
    for source, sides in data:
        for name in PRESETS:
            layer = preset(name)
            for side, x in sides.items():
                own = layer.k if side == "k" else layer.v
                last = layer.n_sink + (x.shape[2] - layer.n_sink) // layer.n_b * layer.n_b
                cuts = {"prefill": (x[:, :, layer.n_sink : last], own.rank),
                        "decode": (x[:, :, -layer.n_b :], own.rank_decode)}  # fmt: skip
                for block, (tokens, rank) in cuts.items():
                    head = {"data": source, "preset": name, "side": side, "block": block}
                    yield head | measure(tokens, side, layer, rank)


def low_rank_shares(rows: list[Row]) -> dict[str, Any]:
    """Return what L·R of the 2-bit preset removes of its residual, and that in a sentence.

    The residual is the codec's own: X minus the base with the outliers apart, so the errors
    compared are those of base+S and of all. Gaussian noise of the same shape is the floor.
    """
    rank = preset(PRESETS[0]).k.rank
    noise = mx.array(np.random.default_rng(SEED).standard_normal((1, *SHAPE)).astype(np.float32))
    left, right = low_rank(noise, rank)
    kept = {"Gaussian noise": [relative_error(noise, left @ right)]}
    for row in rows:
        if (row["preset"], row["block"]) == (PRESETS[0], "prefill"):
            kind = "synthetic" if row["data"].startswith("synthetic") else "real"
            errors = [row["variants"][name]["rel_err"] for name in ("all", "base+S")]
            kept.setdefault(f"{kind} {row['side'].upper()}", []).append(errors[0] / errors[1])
    energy = {name: digits(1 - float(np.mean(np.square(r)))) for name, r in kept.items()}
    error = {name: digits(1 - float(np.mean(r))) for name, r in kept.items()}
    most = max(share for name, share in energy.items() if name.startswith("synthetic"))
    parts = ", ".join(f"{name} {energy[name]:.1%} ({error[name]:.1%})" for name in energy)
    text = (f"The synthetic residual after the base is {'' if most >= LOW_RANK_SHARE else 'not '}"
            f"low-rank (that is, L·R of rank {rank} removing {LOW_RANK_SHARE:.0%} of its energy)."
            f" Removed energy, and in brackets error: {parts}.")  # fmt: skip
    return {"preset": PRESETS[0], "rank": rank, "energy_share": energy, "error_share": error,
            "statement": text}  # fmt: skip


def results(with_model: bool) -> dict[str, Any]:
    """Return everything the script measures."""
    rows, note = list(rows_of(synthetic())), "skipped: --no-model"
    if with_model:
        try:
            rows, note = rows + list(rows_of(real())), "measured"
        except models.ModelError as error:
            print(error, file=sys.stderr)
            note = "skipped: no bundled model; python scripts/fetch_models.py fetches it"
    known = environment()
    where = {"python": known["python"], "machine": f"{platform.system()} {known['machine']}",
             "versions": known["versions"], "blas": BLAS,
             "device": str(mx.device_info().get("device_name", mx.default_device()))}  # fmt: skip
    settings = {"seed": SEED, "shape": SHAPE, "ranks": RANKS, "noise": NOISE,
                "outlier_share": OUTLIER_SHARE, "outlier_size": OUTLIER_SIZE,
                "presets": {name: preset(name).as_dict() for name in PRESETS}}  # fmt: skip
    return {"environment": where, "settings": settings, "real": note,
            "low_rank": low_rank_shares(rows), "rows": rows}  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Print the prefill rows, the layers of the real model averaged, and the statement."""
    table = Table("data", "preset", "", *VARIANTS, "recovered", "bits", box=SIMPLE, padding=0,
                  title="Relative error of a prefill block by term, bits per element")  # fmt: skip
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in found["rows"]:
        if row["block"] == "prefill":
            data = row["data"].removeprefix("synthetic, ").split(",")[0]
            key = (data, row["preset"], row["side"].upper())
            groups.setdefault(key, []).append(row["variants"])
    for key, same in groups.items():
        errors = [f"{np.mean([v[name]['rel_err'] for v in same]):.4f}" for name in VARIANTS]
        recovery, bits = (float(np.mean([v["all"][n] for v in same]))
                          for n in ("recovery", "bits_per_elem"))  # fmt: skip
        table.add_row(*key, *errors, f"{recovery:.1%}", f"{bits:.2f}")
    console = Console()
    console.print(table)
    console.print(f"Real K and V: {found['real']}.")
    console.print(found["low_rank"]["statement"], highlight=False)


def as_json(found: dict[str, Any]) -> str:
    """Return the results as JSON, a row a line."""
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in found["rows"])
    text = json.dumps(found | {"rows": []}, indent=1, ensure_ascii=False)
    return text.replace('"rows": []', f'"rows": [\n  {rows}\n ]') + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results_gear.json"))
    parser.add_argument("--no-model", action="store_true", help="synthetic data alone")
    args = parser.parse_args(arguments)
    found = results(not args.no_model)
    show(found)
    args.out.write_text(as_json(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
