"""The paper's table of a command, out of the records that are there.

    python scripts/tables.py experiment=NAME [WORDS] format=md|latex|csv|html [out=FILE]

WORDS are those of run.py (-m and --config-dir too). Nothing is computed or downloaded: what has not
been run is shown as missing. format=latex standalone=true is an article that compiles by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from evals.names import ConfigError, nearest

OPTIONS = {"format": "md", "out": "", "standalone": "false"}
"""Words of this command alone, with what they are where left out."""


def split(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return this command's options and the words of run.py. ConfigError for a wrong value."""
    from evals.table_formats import FORMATS

    options, words = dict(OPTIONS), []
    for word in argv:
        name, equals, value = word.partition("=")
        if equals and name in OPTIONS:
            options[name] = value
        else:
            words.append(word)
    allowed = {"format": tuple(FORMATS), "standalone": ("true", "false")}
    for name, values in allowed.items():
        if options[name] not in values:
            near = nearest(options[name], values)
            raise ConfigError(f"{name}={options[name]}: must be one of {', '.join(values)}.{near}")
    if options["standalone"] == "true" and options["format"] != "latex":
        raise ConfigError(f"standalone=true: is for format=latex, not format={options['format']}.")
    return options, words


def text(argv: Sequence[str], root: Path) -> tuple[str, str]:
    """Return (the table, the file it goes to or an empty text). ConfigError for wrong words."""
    from evals.cells import cells, typed
    from evals.table_formats import FORMATS, latex
    from evals.tables import table

    options, words = split(argv)
    write = FORMATS[options["format"]]
    if options["standalone"] == "true":
        write = partial(latex, standalone=True)
    return write(table(cells(typed(words), root)), words), options["out"]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code: 2 where it cannot be used."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or {"-h", "--help"} & set(argv):
        print((__doc__ or "").strip())
        return 0 if argv else 2
    # before anything that reads them is loaded: a table never waits for a network
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    from evals.record import results_root

    try:
        made, out = text(argv, results_root())
        if out:
            Path(out).write_text(made, encoding="utf-8")
        else:
            sys.stdout.write(made)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
