"""The numbers of a paper's table: one line for every cell and measure (see evals/tables.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evals import columns, published
from evals.cell_names import Place
from evals.cells import Cell, where
from evals.columns import missing
from evals.report import reason

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

MISSING = "MISSING"
P_VALUE = 0.05
"""A change of answers is marked below this p of McNemar's test."""
COLUMN = ["model", "dataset", "protocol", "metric"]
"""What one column of the table has in common."""
_NOT_SHARES = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")


@dataclass(frozen=True)
class Measure:
    """One number of a cell that a table shows: its column in :mod:`evals.columns`."""

    label: str
    column: str
    form: str
    change: str = ""
    """The column of its difference to fp16."""


MEASURES = {
    "perplexity": (
        Measure("ppl", "ppl_token", ".2f", "delta_nll"),
        Measure("KL", "kl_mean", ".4f"),
    ),
    "reconstruction": (
        Measure("K error", "k_rel_err", ".4f"),
        Measure("V error", "v_rel_err", ".4f"),
    ),
    "downstream": (Measure("score", "score", ".3f", "delta_acc"),),
}
"""What a table shows of each task (``eval.task``); a downstream score goes by its metric's name."""


def frame(cells: Sequence[Cell]) -> pd.DataFrame:
    """Return one line for every cell and measure; fractions, nats, percent of fp16's bytes.

    ``status`` is MISSING where there is no record. ``reported`` has the unit of ``value``. ``best``
    marks the best of a column, fp16 aside; ``significant`` a change that chance does not explain.
    """
    import pandas as pd

    known = columns.frame([cell.record for cell in cells if cell.record])
    rows = {row["key"]: row for row in known.to_dict("records")}
    made = [
        _line(cell, place, measure, rows.get(cell.key or "", {}))
        for cell, place in zip(cells, where([cell.config for cell in cells]), strict=True)
        for measure in MEASURES[cell.config.eval.task]
    ]
    data = pd.DataFrame(made)
    data["metric"] = _metrics(data)
    data["percent"] &= ~data["metric"].isin(_NOT_SHARES)
    data["best"] = _best(data)
    return data


def lines(data: pd.DataFrame) -> list[Row]:
    """Return the lines of a :func:`frame`, with None for what pandas turned into NaN."""
    records = data.to_dict("records")
    return [{n: None if missing(v) else v for n, v in line.items()} for line in records]


def _line(cell: Cell, place: Place, measure: Measure, row: Row) -> Row:
    """Return the numbers of one measure of a cell; ``row`` is its record's, {} without."""
    return {
        "name": cell.name,
        "method": place.row,
        "model": place.model,
        "dataset": place.dataset,
        "protocol": place.protocol,
        "metric": _metric(cell, row) if measure.label == "score" else measure.label,
        **_numbers(cell, measure, row),
        "kv_size_pct": row.get("kv_size_pct"),
        "items": row.get("items"),
        **_reported(cell, place, measure),
        **_state(cell, row),
        "percent": measure.label == "score",
        "form": measure.form,
        "settings": place.settings,
    }


def _numbers(cell: Cell, measure: Measure, row: Row) -> Row:
    """Return a measure with its interval and its difference to fp16, which fp16 itself has not."""
    value, low, high = (row.get(measure.column + end) for end in ("", "_low", "_high"))
    delta = [row.get(measure.change + end) for end in ("", "_low", "_high")]
    p = row.get("mcnemar_p") if measure.label == "score" else None
    if exact := cell.config.cache["name"] == "fp16":
        delta, p = [None] * 3, None
    return {
        "value": None if exact and measure.label == "KL" else value,
        "low": low,
        "high": high,
        "delta": delta[0],
        "delta_low": delta[1],
        "delta_high": delta[2],
        "p_value": p,
        "significant": _significant(p, *delta[1:]),
        "exact": exact,
    }


def _reported(cell: Cell, place: Place, measure: Measure) -> Row:
    """Return what a paper reports for a cell."""
    found = None
    if measure.label == "score":
        config = cell.config
        found = published.lookup(place.settings, config.model.name, config.dataset.name)
    return {
        "reported": found and found.value / 100,
        "reported_by": found and found.source,
        "reported_model": found and found.model,
        "reported_differs": found and found.differs,
    }


def _state(cell: Cell, row: Row) -> Row:
    """Return how a cell came about, or why it did not."""
    record = cell.record or {}
    error = record.get("error")
    return {
        "status": record.get("status", MISSING),
        "reason": reason(error) if error else cell.problem,
        "accounting_only": bool(row.get("accounting_only")),
        "allow_uncompressed": cell.config.eval.allow_uncompressed,
        "key": cell.key,
        "run_id": record.get("mlflow_run_id"),
        "words": cell.words,
    }


def _metric(cell: Cell, row: Row) -> str | None:
    """Return the metric of a task: as measured, else as its dataset names it."""
    named = row.get("metric")
    return (cell.config.dataset.metric or "").replace(",", "-") or None if missing(named) else named


def _metrics(data: Any) -> pd.Series:
    """Return each line's metric; one that no config names is known from its column's records."""
    column = data.groupby(COLUMN[:3], sort=False)["metric"]
    return data["metric"].fillna(column.transform("first")).fillna("score")


def _significant(p: float | None, low: float | None, high: float | None) -> bool:
    """Tell whether a change is one: by McNemar's test, else because its interval excludes 0."""
    if p is not None and not missing(p):
        return p < P_VALUE
    if low is None or high is None or missing(low) or missing(high):
        return False
    return low > 0 or high < 0


def _best(data: Any) -> Any:
    """Return which lines have the best value of their column; fp16 does not compete."""
    value = data["value"].astype(float).where(~data["exact"])
    signed = value.where(data["percent"], -value)
    best = signed.groupby([data[name] for name in COLUMN], sort=False).transform("max")
    return signed.eq(best)
