"""What a table shows: one frame of records, and its cells as a person reads them.

Every number comes from the records. Columns that nothing was measured for are not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from evals.settings import labels

if TYPE_CHECKING:
    import pandas as pd

    from evals.tracking import SweepView

Record = dict[str, Any]

COLUMNS = (
    "method", "kv_size_pct", "stored_bytes", "accounted_bytes",
    "ppl_token", "ppl_token_low", "ppl_token_high",
    "delta_nll", "delta_nll_low", "delta_nll_high", "kl_mean", "top1_flip_rate",
    "k_rel_err", "v_rel_err", "metric", "score", "score_low", "score_high", "items",
    "items_total", "context_compressed", "delta_acc", "delta_acc_low", "delta_acc_high",
    "flips_lost", "flips_gained", "mcnemar_p", "detectable_acc", "agreement",
    "first_divergence",
    "decode_tok_per_s", "status", "run_id",
    "model", "dataset", "eval", "accounting_only", "allow_uncompressed", "key",
)  # fmt: skip
"""Columns of :func:`frame`, always these in this order. Bytes, nats, fractions, percent of fp16."""

NOTES = {
    "*": "bytes are accounted for, not held: this method keeps its tensors dense",
    "†": "eval.allow_uncompressed=true: the compressed share may be too small to mean anything",
}
"""Marks behind a method's name, explained below every table that has them."""

_METRICS = {
    "kv_size_pct": "kv/size_pct",
    "stored_bytes": "kv/stored_bytes",
    "accounted_bytes": "kv/accounted_bytes",
    "delta_nll": "fidelity/delta_nll",
    "delta_nll_low": "fidelity/delta_nll_low",
    "delta_nll_high": "fidelity/delta_nll_high",
    "kl_mean": "fidelity/kl_mean",
    "top1_flip_rate": "fidelity/top1_flip_rate",
    "k_rel_err": "reconstruction/k_rel_err",
    "v_rel_err": "reconstruction/v_rel_err",
    "items": "data/items",
    "items_total": "data/items_total",
    "context_compressed": "coverage/context_compressed",
    "delta_acc": "fidelity/delta_acc",
    "delta_acc_low": "fidelity/delta_acc_low",
    "delta_acc_high": "fidelity/delta_acc_high",
    "flips_lost": "fidelity/flips_lost",
    "flips_gained": "fidelity/flips_gained",
    "mcnemar_p": "fidelity/mcnemar_p",
    "detectable_acc": "fidelity/detectable_acc",
    "agreement": "fidelity/agreement",
    "first_divergence": "fidelity/first_divergence_mean",
    "decode_tok_per_s": "speed/decode_tok_per_s",
}


def frame(records: Sequence[Record], view: SweepView | None = None) -> pd.DataFrame:
    """Return one row a record with :data:`COLUMNS`, the exact caches first, else in their order.

    A value that a record lacks is NaN. Run ids are those of ``view``: a record's own may be of a
    store that is gone, its key never is.
    """
    import pandas as pd  # here: half a second, and only a finished sweep needs it

    names = labels([record["config"] for record in records])
    rows = [_row(record, name, view) for record, name in zip(records, names, strict=True)]
    exact = [record["config"]["cache"]["name"] == "fp16" for record in records]
    order = sorted(range(len(rows)), key=lambda index: not exact[index])
    return pd.DataFrame([rows[index] for index in order], columns=list(COLUMNS))


def _row(record: Record, name: str, view: SweepView | None) -> dict[str, Any]:
    """Return the raw values of one record by column."""
    config, metrics = record["config"], record["metrics"]
    row = {column: metrics.get(metric) for column, metric in _METRICS.items()}
    perplexity = next((m for m in metrics if m.startswith("quality/ppl_token/")), "")
    row |= {f"ppl_token{end}": metrics.get(perplexity + end) for end in ("", "_low", "_high")}
    score = headline(record) or ""
    row |= {f"score{end}": metrics.get(score + end) for end in ("", "_low", "_high")}
    return row | {
        "metric": score.removeprefix("quality/").partition("/")[0] or None,
        "method": name,
        "status": record["status"],
        "run_id": view.run_ids.get(record["key"]) if view else None,
        "model": config["model"]["name"],
        "dataset": config["dataset"]["name"],
        "eval": config["eval"]["name"],
        "accounting_only": bool(record.get("bytes", {}).get("accounting_only")),
        "allow_uncompressed": bool(config["eval"].get("allow_uncompressed")),
        "key": record["key"],
    }


def headline(record: Record) -> str | None:
    """Return the name of the quality metric that stands for a downstream record, or None."""
    if record["config"]["eval"].get("task") != "downstream":
        return None
    name = (record["config"]["dataset"].get("metric") or "").replace(",", "-")
    start = f"quality/{name}/" if name else "quality/"
    return next((metric for metric in record["metrics"] if metric.startswith(start)), None)


Row = dict[str, Any]
_Column = tuple[str, Callable[[Row], str]]


def _form(column: str, form: str) -> Callable[[Row], str]:
    """Return what writes a number of one column."""
    return lambda row: number(row[column], form)


_BYTES: tuple[_Column, ...] = (
    ("method", lambda row: row["method"] + marks(row)),
    ("KV size %", _form("kv_size_pct", ".1f")),
    ("stored", lambda row: size(row["stored_bytes"])),
    ("accounted", lambda row: size(row["accounted_bytes"])),
)
_PERPLEXITY: tuple[_Column, ...] = (
    ("ppl", lambda row: interval(row, "ppl_token", ".2f")),
    ("ΔNLL", lambda row: interval(row, "delta_nll", "+.4f")),
    ("KL", _form("kl_mean", ".4f")),
    ("flips", _form("top1_flip_rate", ".1%")),
)
_ERRORS: tuple[_Column, ...] = (
    ("K error", _form("k_rel_err", ".4f")),
    ("V error", _form("v_rel_err", ".4f")),
)
_TASKS: tuple[_Column, ...] = (
    ("metric", lambda row: "-" if missing(row["metric"]) else row["metric"]),
    ("score", lambda row: interval(row, "score", ".3f")),
    ("items", lambda row: _items(row)),
    ("compressed", _form("context_compressed", ".0%")),
    ("Δ to fp16", lambda row: interval(row, "delta_acc", "+.3f")),
    ("lost / gained", lambda row: _pair(row, "flips_lost", "flips_gained")),
    ("McNemar p", _form("mcnemar_p", ".3f")),
    ("could show", _form("detectable_acc", ".3f")),
    ("same text", _form("agreement", ".0%")),
    ("differs at", _form("first_divergence", ".0f")),
)
_LAST: tuple[_Column, ...] = (
    ("tok/s", _form("decode_tok_per_s", ".1f")),
    ("status", lambda row: row["status"]),
)


def cells(table: pd.DataFrame) -> list[list[str]]:
    """Return a :func:`frame` as a person reads it: headings, then a row of text each; - is empty.

    What no row has measured (perplexity, reconstruction errors, a task's scores) has no columns,
    except perplexity where nothing else was. The last column is the run, or the record's key where
    no run is known.
    """
    rows = table.to_dict("records")

    def measured(column: str) -> bool:
        return any(not missing(row[column]) for row in rows)

    errors, tasks = measured("k_rel_err"), measured("score")
    columns = [
        *_BYTES,
        *(_PERPLEXITY if measured("ppl_token") or not tasks else ()),
        *(_ERRORS if errors else ()),
        *(_TASKS if tasks else ()),
        *_LAST,
    ]
    run = "run" if measured("run_id") else "key"
    return [
        [*(heading for heading, _ in columns), run],
        *([*(write(row) for _, write in columns), _run(row)] for row in rows),
    ]


def _run(row: Row) -> str:
    """Return the run, or the key where none is known; a job that could not be built has neither."""
    known = row["key"] if missing(row["run_id"]) else row["run_id"]
    return "-" if missing(known) else known[:8]


def _items(row: Row) -> str:
    """Return how many items were asked, of how many where it was a seeded subset."""
    if missing(row["items"]):
        return "-"
    items, total = int(row["items"]), int(row["items_total"])
    return str(items) if items == total else f"{items} of {total}"


def _pair(row: Row, first: str, second: str) -> str:
    """Return two counts."""
    return "-" if missing(row[first]) else f"{row[first]:.0f} / {row[second]:.0f}"


def marks(row: Row) -> str:
    """Return the marks of a row, in the order of :data:`NOTES`."""
    return ("*" if row["accounting_only"] else "") + ("†" if row["allow_uncompressed"] else "")


def missing(value: Any) -> bool:
    """Tell whether a cell is empty (pandas turns None into NaN in columns of numbers)."""
    return value is None or value != value


def number(value: Any, form: str) -> str:
    """Return a number as text."""
    return "-" if missing(value) else format(value, form)


def interval(row: Row, column: str, form: str) -> str:
    """Return ``value [low, high]``, or the value alone where there is no interval."""
    value, low, high = (row[f"{column}{end}"] for end in ("", "_low", "_high"))
    if missing(low) or missing(high):
        return number(value, form)
    return f"{number(value, form)} [{number(low, form)}, {number(high, form)}]"


def size(value: Any) -> str:
    """Return bytes in the unit that reads best."""
    if missing(value):
        return "-"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def notes(table: pd.DataFrame) -> list[str]:
    """Return the explanations of the marks that the table has."""
    seen = "".join(marks(row) for row in table.to_dict("records"))
    return [f"{mark} {text}" for mark, text in NOTES.items() if mark in seen]
