"""Records as the runner writes them, nothing computed: for the tests of what shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from evals import record as store
from evals.accuracy import mcnemar, paired_interval, wilson
from gear.config import GearConfig, resolve

Record = dict[str, Any]
LAYERS = 2


def config(cache: str = "gear", settings: GearConfig | None = None, **groups: Any) -> Record:
    """Return a hashed config as evals.job makes it; ``groups`` update or replace its parts."""
    layers: list[Record] = []
    if settings is not None or cache == "gear":
        layers = [layer.as_dict() for layer in resolve(settings or GearConfig(), LAYERS)]
    parts: Record = {
        "protocol": 1,
        "model": {"name": "tiny", "source": "tiny", "layers": LAYERS, "weight_hash": "ab" * 32},
        "dataset": {
            "name": "embedded",
            "source": "embedded",
            "limit": 6,
            "revision": None,
            "content_hash": "cd" * 32,
            "n_documents": 6,
        },
        "eval": {
            "name": "decode",
            "task": "perplexity",
            "protocol": "decode",
            "chunk": None,
            "allow_uncompressed": False,
        },
        "cache": {"name": cache, "layers": layers},
        "seed": 0,
        "backend": "cpu",
        "dtype": "float32",
    }
    for name, value in groups.items():
        parts[name] = {**parts[name], **value} if isinstance(value, dict) else value
    return store.plain(parts)


def finished(cache: str = "gear", quality: float = 0.0, **given: Any) -> Record:
    """Return a FINISHED record whose numbers follow from ``quality`` (ΔNLL in nats)."""
    parts = config(cache, **given)
    exact = cache == "fp16"
    stored = 2_000_000 if exact else 400_000 - int(1e6 * quality)
    metrics = {
        "quality/ppl_token/decode": 20.0 + 20 * quality,
        "quality/ppl_token/decode_low": 18.5,
        "quality/ppl_token/decode_high": 21.25,
        "quality/ppl_word/decode": 41.0,
        "quality/bits_per_byte/decode": 1.25,
        "kv/stored_bytes": stored,
        "kv/accounted_bytes": 0 if exact else stored - 100_000,
        "kv/buffer_bytes": stored if exact else 100_000,
        "kv/held_bytes": stored,
        "kv/fp16_bytes": 2_000_000,
        "kv/size_pct": 100 * stored / 2_000_000,
        "speed/prefill_tok_per_s": 512.0,
        "speed/decode_tok_per_s": 96.04,
        "mem/peak_bytes": 5_000_000,
        "guard/tokens_compressed": 0 if exact else 512,
    }
    if not exact:
        metrics |= {
            "fidelity/kl_mean": quality / 2,
            "fidelity/kl_p99": quality,
            "fidelity/kl_max": 2 * quality,
            "fidelity/top1_flip_rate": 0.0625,
            "fidelity/delta_nll": quality,
            "fidelity/delta_nll_low": quality - 0.01,
            "fidelity/delta_nll_high": quality + 0.0125,
            "speed/compress_ms": 12.5,
        }
    body = {
        "metrics": metrics,
        "bytes": {
            "accounting_only": False,
            "terms": {"codes": stored},
            "per_layer": [
                {"layer": i, "covered": True, "stored_bytes": stored // 2, "fp16_bytes": 1_000_000}
                for i in range(LAYERS)
            ],
        },
        "status": store.FINISHED,
        "guards": {"metrics finite": "passed"},
    }
    return _record(parts, body)


def answered(
    cache: str = "gear", right: int = 50, n: int = 100, exact: int = 50, **given: Any
) -> Record:
    """Return the FINISHED record of a task: ``right`` of ``n`` answers, ``exact`` of fp16."""
    record = finished(cache, 0.0, **given)
    dataset = record["config"]["dataset"]
    name = f"quality/{dataset['metric'].replace(',', '-')}/{dataset['name']}"
    kept = {k: v for k, v in record["metrics"].items() if k.startswith(("kv/", "mem/", "speed/"))}
    metrics = kept | {"data/items": n, "data/items_total": n, "coverage/context_compressed": 1.0}
    metrics[name] = right / n
    metrics[f"{name}_low"], metrics[f"{name}_high"] = wilson(right, n, 0.95)
    if cache != "fp16":
        lost, gained = max(exact - right, 0), max(right - exact, 0)
        both = min(right, exact)
        low, high = paired_interval(both, lost, gained, n - both - lost - gained, 0.95)
        metrics |= {
            "fidelity/delta_acc": (right - exact) / n,
            "fidelity/delta_acc_low": low,
            "fidelity/delta_acc_high": high,
            "fidelity/flips_lost": lost,
            "fidelity/flips_gained": gained,
            "fidelity/mcnemar_p": mcnemar(lost, gained),
        }
    return {**record, "metrics": metrics}


def failed(cache: str = "gear", **given: Any) -> Record:
    """Return the FAILED record of a job whose worker died."""
    message = "the worker died: exit status -11"
    log = "loading the model\nFatal Python error: Segmentation fault\n\n"
    return _record(
        config(cache, **given), store.failure("WorkerDied", message, signal="SIGSEGV", log_tail=log)
    )


def _record(parts: Record, body: Record) -> Record:
    """Return a whole record around a body."""
    return {
        "key": store.run_key(parts),
        "config": parts,
        **body,
        "environment": {"python": "3.11.7", "git": None},
        "started": "2026-01-02T03:04:05+00:00",
        "finished": "2026-01-02T03:04:25+00:00",
        "mlflow_run_id": None,
    }


def sweep() -> list[Record]:
    """Return an fp16 arm and GEAR at rank 4 and 8."""
    gear = GearConfig()
    return [
        finished("fp16"),
        finished("gear", 0.125, settings=gear),
        finished("gear", 0.0625, settings=replace(gear, rank=8)),
    ]


def commit(root: Path, records: list[Record]) -> list[Record]:
    """Put records on disk, each with a line of samples, and return them."""
    for record in records:
        store.commit(root, record["key"], record)
        folder = store.record_dir(root, record["key"])
        (folder / store.SAMPLES).write_text('{"document": "a", "nll": 1.5}\n', encoding="utf-8")
        (folder / store.LOG).write_text("a line\n", encoding="utf-8")
    return records


def on_disk(root: Path, record: Record) -> Record:
    """Return the record as it is on disk now."""
    found = store.load(root, record["key"])
    assert found is not None
    return found
