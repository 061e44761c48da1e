"""Run a record's job again and say whether the numbers agree, and if not, what differs.

    python scripts/reproduce.py WHAT [WORDS]

WHAT is the beginning of a record's key or of its MLflow run id, or a record's folder. The words its
record keeps (or WORDS, for a record without) are composed and run in a results root of their own,
which is removed: nothing is overwritten, nothing goes to MLflow. Exit code 0 where key and result
are equal, speeds and peaks aside.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals import record as store
from evals.names import ConfigError

Record = dict[str, Any]

_UNSTEADY = ("speed/", "mem/")
_PARTS = ("status", "guards", "coverage", "bytes")


@dataclass(frozen=True)
class Difference:
    """One thing that differs: what it is, then and now as texts."""

    what: str
    then: str
    now: str


@dataclass(frozen=True)
class Comparison:
    """A record beside the one its words make now."""

    config: list[Difference]
    """Fields of the effective config; with any, the keys differ."""
    metrics: list[Difference]
    """Metrics that are not equal to the last bit, without speeds and peaks."""
    compared: int
    """Metrics that were compared."""
    parts: list[Difference]
    """Other parts of the result."""
    environment: list[Difference]
    """Versions, machine, device, commit: no difference here makes results unequal by itself."""

    @property
    def equal(self) -> bool:
        """Tell whether the same config gave the same result."""
        return not (self.config or self.metrics or self.parts)


def find(what: str, root: Path) -> Record:
    """Return the record that ``what`` names. ConfigError where there is none, or more than one."""
    places = (Path(what), root / what)
    if what and (folder := next((p for p in places if (p / store.RECORD).is_file()), None)):
        folder = folder.resolve()
        if (record := store.load(folder.parents[1], folder.name)) is not None:
            return record
        raise ConfigError(
            f"{what}: its {store.RECORD} is not whole, or not that of the key it is named by."
        )
    found = [record for record in store.records(root) if what and _named(record, what)]
    if len(found) == 1:
        return found[0]
    if found:
        keys = ", ".join(record["key"][:12] for record in found)
        raise ConfigError(f"{what}: {len(found)} records begin so: {keys}. Write more of it.")
    raise ConfigError(
        f"{what}: no record under {root / 'records'} has a key or MLflow run id that begins so."
        " Next step: python scripts/explain.py NAME finds keys; in MLflow it is the tag gear.key."
    )


def _named(record: Record, what: str) -> bool:
    """Tell whether a key or run id begins with ``what``."""
    return record["key"].startswith(what) or (record["mlflow_run_id"] or "").startswith(what)


def again(words: Sequence[str]) -> Record:
    """Return the record that the words of one job make now, its fp16 arm computed with it.

    ConfigError (or what building the job raises) where they cannot be used. MLX is loaded in the
    worker alone.
    """
    from evals.compose import plan
    from evals.job import build_job
    from evals.runner import Session
    from evals.validate import check_plan

    planned = plan(list(words))
    if len(planned.jobs) != 1:
        raise ConfigError(
            f"{shlex.join(words)}: makes {len(planned.jobs)} jobs; must be one. Give each swept"
            " setting one value."
        )
    check_plan(planned)
    [config] = planned.configs
    with tempfile.TemporaryDirectory(prefix="gear-reproduce-") as folder:
        root = Path(folder)
        build_job(config, root)  # what cannot be used is an error here, not a FAILED record
        with Session(root, list(words), [config]) as session:
            return session.run(config, words)


def compare(then: Record, now: Record) -> Comparison:
    """Return what differs between two records of one job."""
    from evals.settings import flatten

    ours, theirs = (_steady(record["metrics"]) for record in (now, then))
    return Comparison(
        list(_differences(flatten(then["config"]), flatten(now["config"]))),
        list(_differences(theirs, ours)),
        len({**theirs, **ours}),
        list(_differences(*map(_parts, (then, now)))),
        list(_differences(_flat(then["environment"]), _flat(now["environment"]))),
    )


def _parts(record: Record) -> dict[str, Any]:
    """Return what else must repeat; a log's tail holds times and paths."""
    error = {n: v for n, v in (record.get("error") or {}).items() if n != "log_tail"}
    return {**{name: record.get(name) for name in _PARTS}, "error": error or None}


def _steady(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that must repeat."""
    return {name: value for name, value in metrics.items() if not name.startswith(_UNSTEADY)}


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield what two mappings do not agree on; ``-`` is what one has not."""
    for name in dict.fromkeys([*then, *now]):
        if then.get(name) != now.get(name):
            yield Difference(name, _text(then.get(name)), _text(now.get(name)))


def _text(value: Any) -> str:
    """Return a value in one line; floats with all their digits."""
    text = "-" if value is None else " ".join(str(value).split())
    return text if len(text) <= 200 else f"{text[:197]}…"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= (
            _flat(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return flat


def told(then: Record, comparison: Comparison) -> str:
    """Return the comparison as a person reads it."""
    found = comparison
    lines = [
        f"key {then['key'][:12]}: " + ("differs, its words compose to another config now"
        if found.config else "equal"),
        *_lines(found.config),
        f"metrics: {found.compared - len(found.metrics)} of {found.compared} equal bit for bit",
        *_lines(found.metrics, _relative),
        *([f"also different: {', '.join(d.what for d in found.parts)}"] if found.parts else []),
        *_lines(found.parts),
        "environment: " + ("differs" if found.environment else "equal"),
        *_lines(found.environment),
        "The result is reproduced." if found.equal else "The result is NOT reproduced.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _lines(found: Sequence[Difference], more: Any = lambda _: "") -> list[str]:
    """Return a line for each difference."""
    return [f"  {d.what}: then {d.then}, now {d.now}{more(d)}" for d in found]


def _relative(difference: Difference) -> str:
    """Return how far a metric is off, relative to what it was."""
    try:
        then, now = float(difference.then), float(difference.now)
    except ValueError:
        return ""
    return f" (relative {abs(now - then) / abs(then):.1e})" if then else ""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0 where the result is reproduced, 1 where not, 2 for no run."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or {"-h", "--help"} & set(argv):
        print((__doc__ or "").strip())
        return 0 if argv else 2
    from evals.cells import typed

    try:
        then = find(argv[0], store.results_root())
        words = typed(argv[1:]) or then.get("words")
        if words is None:
            raise ConfigError(
                f"{argv[0]}: its record is older than the words it would be made with. Write them"
                " behind it: scripts/reproduce.py KEY model=… dataset=… cache=… gear.rank=…"
            )
        print(f"python run.py {shlex.join(words)}", flush=True)
        comparison = compare(then, again(words))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.write(told(then, comparison))
    return int(not comparison.equal)
