"""What every figure shares: a drawing with its numbers, how it is saved, colours, panels, labels.

Drawn off-screen and without pyplot, so without global state. Colours are Okabe and Ito's, which
colour-blind readers can tell apart, and cividis for heat maps. A name is shown as it is written:
matplotlib reads no formula into it, and a long one is cut in figures, never in the numbers.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.columns import missing
from evals.record import FINISHED

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]
Row = dict[str, Any]
Samples = Callable[[str], Sequence[Record]]
"""Returns the samples of the record with a key."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", ":", "-.")
HEAT = "cividis"
MIB = 2**20
LABEL_LENGTH = 60
"""Characters of a name in a figure."""
_DPI = 144
_PANEL = ("model", "dataset", "eval")


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure and the numbers behind it, one row a mark."""

    figure: Figure
    data: pd.DataFrame


def drawing(figure: Figure, rows: Sequence[Row]) -> Drawing:
    """Return a drawing of ``rows``, whose first has all columns."""
    import pandas as pd

    as_written(figure)
    return Drawing(figure, pd.DataFrame(rows, columns=list(rows[0])))


def as_written(figure: Figure) -> None:
    """Let every text that the figure has by now be shown as it is, dollar signs included."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if isinstance(text, Text):  # for the type checker: findobj is declared wider
            text.set_parse_math(False)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep it to ourselves that the font lacks a name's letters: a box in their place says it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")
        yield


def save(drawing: Drawing, folder: Path, name: str) -> None:
    """Write NAME.png, NAME.pdf and NAME.csv; the same drawing gives the same bytes."""
    (folder / f"{name}.png").write_bytes(image(drawing, "png"))
    (folder / f"{name}.pdf").write_bytes(image(drawing, "pdf"))
    (folder / f"{name}.csv").write_text(numbers(drawing), encoding="utf-8")


@lru_cache(maxsize=16)  # a sweep's figures are files and stand in its report
def image(drawing: Drawing, form: str) -> bytes:
    """Return the figure as ``png`` or ``pdf``, with no date in it."""
    buffer = io.BytesIO()
    metadata = {"CreationDate": None} if form == "pdf" else None
    with quiet():
        drawing.figure.savefig(buffer, format=form, dpi=_DPI, metadata=metadata)
    return buffer.getvalue()


def numbers(drawing: Drawing) -> str:
    """Return the numbers as CSV with a header line."""
    return drawing.data.to_csv(index=False, lineterminator="\n")


def grid(
    rows: int, columns: int, size: tuple[float, float], *, engine: bool = True
) -> tuple[Figure, np.ndarray]:
    """Return a figure of [rows, columns] axes, each of ``size`` inches.

    Without the ``engine``, which doubles the cost of a figure, the caller sees to the margins.
    """
    from matplotlib.figure import Figure

    layout = "constrained" if engine else None
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout=layout)
    return figure, figure.subplots(rows, columns, squeeze=False)


def cells(
    count: int, size: tuple[float, float], *, columns: int = 3, extra: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``count`` axes, at most ``columns`` side by side, the rest below.

    ``extra`` inches of width are for a legend at the right.
    """
    columns = min(count, columns)
    figure, axes = grid(-(-count // columns), columns, size)
    figure.set_figwidth(figure.get_figwidth() + extra)
    flat = list(axes.flat)
    for unused in flat[count:]:
        unused.remove()
    return figure, flat[:count]


def colour_scale(figure: Figure, axes: Any, highest: float, label: str) -> None:
    """Draw the scale from 0 to ``highest`` that heat maps of ``axes`` share."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure.colorbar(ScalarMappable(Normalize(0, highest), HEAT), ax=axes, label=label)


def panels(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the finished records by what may share a panel: model, dataset and protocol."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["status"] == FINISHED:
            found.setdefault(" · ".join(where(record).values()), []).append(record)
    return found


def where(record: Record) -> dict[str, str]:
    """Return the names of a record's model, dataset and protocol."""
    return {group: record["config"][group]["name"] for group in _PANEL}


def styles(records: Iterable[Record]) -> dict[str, Row]:
    """Return a colour and a marker for each cache, in the order of the records."""
    names = dict.fromkeys(record["config"]["cache"]["name"] for record in records)
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        for i, name in enumerate(names)
    }


def short(text: str, length: int = LABEL_LENGTH) -> str:
    """Return a name on one line, without ``gear.`` and cut in the middle where it is too long."""
    text = " ".join(text.split()).replace("(gear.", "(").replace(", gear.", ", ")
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def ends(value: float, low: Any, high: Any) -> list[list[float]] | None:
    """Return the lengths of an interval below and above, None where there is none.

    A bootstrap's interval need not hold the estimate, and matplotlib wants lengths.
    """
    if missing(low) or missing(high):
        return None
    return [[max(value - low, 0.0)], [max(high - value, 0.0)]]
