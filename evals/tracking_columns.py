"""What MLflow's page of an experiment shows: its kind, its description, and saved views. No MLflow.

Without a choice the page has columns for nothing that is measured here, and MLflow has no setting
for others. It has saved views, kept in tags of the experiment and listed under "Views": one is made
of sweeps with their jobs, and one of the jobs of each kind of evaluation, with the settings that
sweeps vary and the metrics they measure. The form of such a tag is that of the page's own code:
MLflow 3.13 opens a view by its address, 3.17 also lists it and wants an envelope; a tag is both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from evals.columns import headline
from evals.settings import flatten, varied

Record = dict[str, Any]
Texts = dict[str, str]

VIEW_TAG = "mlflow.sharedViewState."
SWEEPS = "sweeps"
"""The view in which jobs are below their sweeps."""
EXPERIMENT_TAGS = {
    # Else the page takes it for an application that makes traces and opens on those.
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.note.content": "A sweep is a parent run with its table, figures and report; its jobs"
    " are its children. **Views** has the columns worth comparing.",
}
"""An experiment's own tags, where it has none of the name."""

_METRICS = (
    "kv/size_pct", "fidelity/delta_nll", "fidelity/kl_mean", "fidelity/top1_flip_rate",
    "fidelity/delta_acc", "reconstruction/k_rel_err", "reconstruction/v_rel_err",
    "speed/decode_tok_per_s",
)  # fmt: skip
_QUALITY = "quality/ppl_token/"
_ENDS = ("_low", "_high")
_JOBS_FIRST = {"orderByKey": "metrics.`kv/size_pct`", "orderByAsc": True}
"""Sorted by anything but their time, jobs are shown without the parents that hold them together."""
_JOBS_OF = "params.`eval.task` = '{}' and tags.`gear.kind` = 'job' and tags.`gear.reused` = 'false'"
_OPTIONS = ("model", "dataset", "eval")
_ORDER = ("metrics.`kv/", "metrics.`quality/", "metrics.`fidelity/", "metrics.", "params.", "")
_NAME_COLUMN = "attributes.`Run Name`"
_LONGEST = 20_000
"""Characters of an experiment's tag (MLflow's limit); a view that is longer stays as it was."""


def view_id(name: str) -> str:
    """Return the id of a view, which an address names."""
    return f"gear-{name}"


def new_tags(records: Sequence[Record], tags: Texts) -> Texts:
    """Return what an experiment with ``tags`` lacks: its own, and of views what ``records`` add."""
    shown = {SWEEPS: list(records)}
    for record in records:
        shown.setdefault(record["config"]["eval"].get("task") or "other", []).append(record)
    found = {tag: value for tag, value in EXPERIMENT_TAGS.items() if tag not in tags}
    for name, mine in shown.items():
        tag = VIEW_TAG + view_id(name)
        old = _columns_of(tags.get(tag, ""))
        if new := _columns(mine) - old:
            view = _view(name, sorted(old | new, key=_place))
            found |= {tag: view} if len(view) <= _LONGEST else {}
    return found


def _columns(records: Sequence[Record]) -> set[str]:
    """Return the columns of records, named as the page names them."""
    tags = {f"gear.{option}" for option in _OPTIONS}
    params = {"cache.name"}
    for more in varied([flatten(record["config"]) for record in records]):
        params |= {name for name in more if name not in (*_OPTIONS, "cache")}
    metrics: set[str] = set()
    for record in records:
        quality = {name for name in record["metrics"] if name.startswith(_QUALITY)}
        names = {*_METRICS, headline(record), *(q for q in quality if not q.endswith(_ENDS))}
        metrics |= names & record["metrics"].keys()
    return {
        *(f"tags.`{name}`" for name in tags),
        *(f"params.`{name}`" for name in params),
        *(f"metrics.`{name}`" for name in metrics),
    }


def _place(column: str) -> tuple[int, str]:
    """Return where a column stands: metrics as tables have them, then parameters, then tags."""
    return next(i for i, start in enumerate(_ORDER) if column.startswith(start)), column


def _columns_of(view: str) -> set[str]:
    """Return the columns of a view's tag, none where it cannot be read."""
    try:
        return set(json.loads(json.loads(view)["state"])["selectedColumns"])
    except (ValueError, KeyError, TypeError):
        return set()


def _view(name: str, columns: Sequence[str]) -> str:
    """Return the tag of a view: of sweeps, or of every job of a kind once, smallest cache first."""
    state = _JOBS_FIRST | {"searchFilter": _JOBS_OF.format(name)} if name != SWEEPS else {}
    state |= {
        "selectedColumns": list(columns),
        "columnOrder": [_NAME_COLUMN, *columns],
        # Pixels; else names of runs and metrics are cut after a word.
        "columnWidths": {_NAME_COLUMN: 320} | {name: 5 * len(name) + 20 for name in columns},
    }
    envelope = {"name": name, "createdAt": 0, "updatedAt": 0, "state": json.dumps(state)}
    return json.dumps({**envelope, **state})
