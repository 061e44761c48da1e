"""Attention of one query token over packed blocks by one fused GPU kernel, and its merge.

`partial` computes what the MLX operations of attention.py do, from the codes straight to a
`Partial`: the tokens are split over thread groups (flash-decoding), each with a running softmax,
and a second kernel merges the splits. K and V may differ in every setting. Every variant of the
kernel (bits, heads, dtypes) is held against plain operations when it is first wanted on a device,
and switched off with a warning where it disagrees.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from gear.block import Block
from gear.config import GearConfig, resolve
from gear.decode_kernel_source import INPUTS, MERGE_INPUTS, OUTPUTS, SIZES, sources
from gear.decode_kernel_variant import ROWS, TILE, Variant
from gear.kernels import backend

_THREAD_GROUPS = {"metal": 256, "cuda": 512}  # an H200 holds four a multiprocessor
_MOST_HEADS = 8
_EXAMPLE_HEADS = 2
_ONE = 0x3F800000  # the bits of 1.0
_TERMS = {"left": "left", "right": "right", "index": "outlier_index", "value": "outlier_value"}
_FLOATS = (mx.float16, mx.bfloat16, mx.float32)
_FAR = 5e-3  # of the largest entry; a wrong term is off by more

Partial = tuple[mx.array, mx.array, mx.array]
"""Sum of exp(s - peak)·v, peak = max s, sum of exp(s - peak); the last two keep an axis of 1."""


@lru_cache(maxsize=2)
def _absent(dtype: mx.Dtype) -> mx.array:
    """Return what stands for the array of a missing term; Metal passes fewer than 8 otherwise."""
    return mx.zeros(8, dtype)


def _arrays(block: Block) -> list[mx.array]:
    """Return a side's arrays in the order of the kernel's inputs."""
    arrays = block.arrays
    found = [arrays["codes"], arrays["scale"], arrays["zero"]]
    for name, stored in _TERMS.items():
        dtype = mx.uint16 if name == "index" else mx.float16
        found.append(arrays[stored] if stored in arrays else _absent(dtype))
    return found


@lru_cache(maxsize=256)
def _variant(*key: Any) -> Variant:
    """Return the one `Variant` of a key, its dtypes last: what it works out is kept with it."""
    return Variant(*key[:7], dtypes=key[7:])


def _needed(queries: mx.array, k: Block, v: Block, kind: str) -> Variant:
    """Return the variant that these arrays need."""
    group = queries.shape[1] // k.arrays["codes"].shape[1]
    k_along = 0 if k.settings.base == "vector" else _along(k)
    dtypes = [a.dtype for a in (queries, *_arrays(k), *_arrays(v))]
    return _variant(
        kind, group, k.head_dim, k.settings.bits, v.settings.bits, k_along, _along(v), *dtypes
    )


def _along(block: Block) -> int:
    """Return how many entries of a row share a scale."""
    if block.settings.base != "vector":
        return block.settings.group_size
    return block.tokens if block.side == "k" else block.head_dim


def _reads(block: Block) -> bool:
    """Say whether the kernel reads this side: whole words a group, terms in floats per vector."""
    bits, columns = block.settings.bits, block.tokens if block.side == "k" else block.head_dim
    if bits not in (2, 4, 8) or columns * bits % 32 or min(_along(block), columns) * bits % 32:
        return False
    if block.side == "k" and columns % _along(block):
        return False
    names = block.arrays.keys()
    if "outlier_scale" in names or any(n.endswith("_grid") for n in names):
        return False
    index = block.arrays.get("outlier_index")
    return index is None or index.ndim == 5


def _fits(queries: mx.array, k: Block, v: Block) -> bool:
    """Say whether shapes and settings are among those the kernel is written for."""
    if queries.ndim != 4 or queries.shape[2] != 1 or queries.dtype not in _FLOATS:
        return False
    if not (k.packed and v.packed):
        return False
    group, rest = divmod(queries.shape[1], k.arrays["codes"].shape[1])
    if rest or not 1 <= group <= _MOST_HEADS:
        return False
    if (k.tokens, k.count, k.head_dim) != (v.tokens, v.count, v.head_dim):
        return False
    even = k.tokens % TILE == 0 or TILE % k.tokens == 0
    blocks = max(TILE // k.tokens, 1) if even else TILE // k.tokens + 2
    if blocks * max(k.rank, v.rank) > ROWS or k.count * k.tokens * k.head_dim >= 1 << 32:
        return False
    return k.head_dim % 4 == 0 and k.head_dim <= 256 and _reads(k) and _reads(v)


def usable(queries: mx.array, k: Block, v: Block) -> bool:
    """Say whether `partial` takes these arrays, on this device, and is right there."""
    kind = backend()
    if kind is None or not _fits(queries, k, v):
        return False
    variant = _needed(queries, k, v, kind)
    return variant.constants is not None and _trusted(variant)


@lru_cache(maxsize=256)
def _build(name: str, kind: str, *constants: tuple[str, int]) -> Any:
    """Return a kernel of one backend that is compiled when it is first used."""
    make = mx.fast.metal_kernel if kind == "metal" else mx.fast.cuda_kernel
    header, source = sources(name, kind, constants)
    inputs = MERGE_INPUTS if name == "merge" else INPUTS
    return make(
        name="_".join(["gear_decode", name, *(str(n) for _, n in constants)]),
        input_names=list(inputs), output_names=list(OUTPUTS), source=source, header=header,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _decode(variant: Variant) -> tuple[Any, int]:
    """Return the kernel of a variant and the threads of its groups."""
    constants = variant.constants or {}
    return _build(variant.form, variant.kind, *constants.items()), 32 * constants["SIMDS"]


@lru_cache(maxsize=1024)
def _numbers(*sizes: int) -> mx.array:
    """Return numbers for a kernel, uint32; kept, because each new array is one more copy."""
    return mx.array(list(sizes), mx.uint32)


def splits(valid: int, rows: int, kind: str) -> tuple[int, int]:
    """Return how many thread groups share ``valid`` tokens of a row, and the tiles of each."""
    tiles = -(-valid // TILE)
    each = -(-tiles // max(_THREAD_GROUPS[kind] // rows, 1))
    return -(-tiles // each), each


def _sizes(k: Block, v: Block, valid: int, tiles: int, parts: int) -> mx.array:
    """Return the numbers of SIZES."""
    batch, heads = k.arrays["codes"].shape[:2]
    kept = [
        b.arrays["outlier_index"].shape[-1] if "outlier_index" in b.arrays else 0 for b in (k, v)
    ]
    sizes = {
        "valid": valid, "tokens": k.tokens, "count": k.count, "tiles": tiles,
        "k_group": _along(k), "v_group": _along(v), "k_rank": k.rank, "v_rank": v.rank,
        "k_kept": kept[0], "v_kept": kept[1], "kv_heads": heads,
        "v_scale_heads": v.arrays["scale"].shape[1], "parts": parts,
        "row_count": batch * heads * parts, "one": _ONE,
    }  # fmt: skip
    return _numbers(*(sizes[name] for name in SIZES))


def partial(queries: mx.array, k: Block, v: Block, valid: int) -> Partial:
    """Attend over the first ``valid`` tokens of K and V (`usable` first).

    ``queries`` [batch, heads, 1, head_dim] are already multiplied by the softmax scale. Returns, in
    fp32, sum of exp(s - peak)·v [batch, heads, 1, head_dim], peak = max s and the sum of
    exp(s - peak), both [batch, heads, 1, 1].
    """
    return _run(_needed(queries, k, v, str(backend())), queries, k, v, valid)


def _run(variant: Variant, queries: mx.array, k: Block, v: Block, valid: int) -> Partial:
    """Run the kernel, and the merge where tokens were split."""
    decode, threads = _decode(variant)
    batch, heads, _, d = queries.shape
    rows = batch * k.arrays["codes"].shape[1] * variant.parts
    count, tiles = splits(valid, rows, variant.kind)
    shape = () if count == 1 else (count,)
    shapes = [(*shape, batch, heads, 1, n) for n in (d, 1, 1)]
    found = decode(
        inputs=[queries, _sizes(k, v, valid, tiles, variant.parts), *_arrays(k), *_arrays(v)],
        grid=(count * threads, rows, 1), threadgroup=(threads, 1, 1), output_shapes=shapes,
        output_dtypes=[mx.float32] * 3,
    )  # fmt: skip
    if count > 1:
        shares = max(512 // d, 1)
        found = _build("merge", variant.kind, ("D", d), ("SHARES", shares))(
            inputs=[*found, _numbers(count, batch * heads)], grid=(d * shares, batch * heads, 1),
            threadgroup=(d * shares, 1, 1), output_shapes=[s[1:] for s in shapes],
            output_dtypes=[mx.float32] * 3,
        )  # fmt: skip
    return found[0], found[1], found[2]


def _example(variant: Variant, side: str, count: int, terms: bool) -> Block:
    """Return ``count`` blocks of random content in the dtypes of ``variant``: 1,152 tokens."""
    draw = np.random.default_rng(count)
    bits, tokens, d = getattr(variant, f"{side}_bits"), 1152 // count, variant.head_dim
    settings = replace(getattr(resolve(GearConfig(), 1)[0], side), bits=bits)
    rows = (1, _EXAMPLE_HEADS, d if side == "k" else 1152)
    columns, vectors = (1152, d) if side == "k" else (d, tokens)
    n = tokens if side == "k" else d
    group, stack, rank, kept = settings.group_size, (1, _EXAMPLE_HEADS, count), 2, max(n // 32, 1)
    found = {
        "codes": draw.integers(0, 1 << 32, (*rows, columns * bits // 32)),
        "scale": draw.uniform(0.5, 1.5, (*rows, -(-columns // group))) / 2**bits,
        "zero": draw.standard_normal((*rows, -(-columns // group))) - 0.5,
        "left": draw.standard_normal((*stack, rank, tokens)),
        "right": draw.standard_normal((*stack, rank, d)),
        "outlier_index": np.sort(draw.random((*stack, vectors, n)).argsort(-1)[..., :kept]),
        "outlier_value": draw.standard_normal((*stack, vectors, kept)) * 8,
    }
    dtypes = variant.dtypes[1:8] if side == "k" else variant.dtypes[8:]
    used = list(zip(found.items(), dtypes, strict=True))[: None if terms else 3]
    arrays = {name: mx.array(value).astype(dtype) for (name, value), dtype in used}
    return Block(side, settings, tokens, d, rank if terms else 0, count, arrays)


def _error(variant: Variant, count: int, terms: bool) -> float:
    """Return how far the kernel is from plain operations on an example, relative to its largest."""
    valid, heads = 1100, variant.group * _EXAMPLE_HEADS
    k, v = (_example(variant, side, count, terms) for side in "kv")
    draw = np.random.default_rng(0).standard_normal((1, heads, 1, variant.head_dim))
    queries = mx.array(draw * 0.2).astype(variant.dtypes[0])
    keys, values = (mx.repeat(b.reconstruct()[:, :, :valid], variant.group, axis=1) for b in (k, v))
    scores = (queries.astype(mx.float32) * keys).sum(axis=-1)[:, :, None]
    expected = (mx.softmax(scores, axis=-1).swapaxes(-1, -2) * values).sum(axis=-2, keepdims=True)
    out, peak, weight = _run(variant, queries, k, v, valid)
    lost = mx.abs(peak + mx.log(weight) - mx.logsumexp(scores, axis=-1, keepdims=True)).max()
    far = mx.abs(out / weight - expected).max() / mx.abs(expected).max()
    return float(np.array(mx.maximum(lost, far)))


@lru_cache(maxsize=256)
def _trusted(variant: Variant) -> bool:
    """Say whether a variant is right on this device; warn where it is not."""
    short_index = variant.dtypes[6] == mx.uint8  # no blocks of more than 256 tokens then
    cases = [(9, True), (9, False)] if short_index else [(9, True), (1, True), (1, False)]
    try:
        errors = [_error(variant, count, terms) for count, terms in cases]
    except (RuntimeError, ValueError) as error:
        problem = str(error).splitlines()[0]
    else:
        if max(errors) < _FAR:
            return True
        problem = f"off by {max(errors):.2g} against the MLX operations"
    warnings.warn(
        f"GEAR's fused decode kernel is switched off for {variant.k_bits}-bit K and "
        f"{variant.v_bits}-bit V on {variant.kind}: {problem}.", RuntimeWarning, stacklevel=2,
    )  # fmt: skip
    return False
