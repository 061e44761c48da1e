"""Experiments: what the header of each ``conf/experiment/*.yaml`` says of its question.

A header is the comment at the top of the file, in five parts: Question, Command, Takes, Expected,
Decision. Reports print them, ``job.dry_run`` shows them, and tests hold that ours have all five; a
part that a file of one's own leaves out is empty. Nothing is composed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path

from evals.names import ConfigError, conf_dir, nearest, options

GROUP = "experiment"
_FOLDERS = re.compile(r"file://([^\"',\]]+)")


@dataclass(frozen=True)
class Experiment:
    """A recorded question; each part is one paragraph of plain text, empty where absent."""

    name: str
    question: str
    command: str
    takes: str
    expected: str
    decision: str


PARTS = tuple(field.name for field in fields(Experiment) if field.name != "name")


def experiment(name: str, folders: Iterable[Path] = ()) -> Experiment:
    """Return the experiment ``name`` of conf/ or of ``folders`` (those of ``--config-dir``).

    Raises :class:`ConfigError` with the nearest name for one that does not exist.
    """
    places = [conf_dir(), *folders]
    for folder in places:
        if (path := folder / GROUP / f"{name}.yaml").is_file():
            return Experiment(name, **header(path.read_text(encoding="utf-8")))
    known = options(places).get(GROUP, [])
    raise ConfigError(
        f"experiment={name}: there is no such option.{nearest(name, known)}"
        f" Available: {', '.join(known)}"
    )


def named_in(words: Sequence[str]) -> Experiment | None:
    """Return the experiment that a command's words name, from their ``--config-dir`` too.

    None where they name none, or one whose file is gone: a record outlives it.
    """
    names = [word.partition("=")[2] for word in words if word.startswith(f"{GROUP}=")]
    if not names or names[-1] in ("", "null"):
        return None
    try:
        return experiment(names[-1], _folders(words))
    except ConfigError:
        return None


def _folders(words: Sequence[str]) -> list[Path]:
    """Return the folders of ``--config-dir FOLDER``, and of the word that evals.cli makes of it."""
    found: list[str] = []
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word in ("--config-dir", "-cd"):
            found.append(after)
        elif word.startswith("--config-dir="):
            found.append(word.partition("=")[2])
        elif word.startswith("hydra.searchpath="):
            found += _FOLDERS.findall(word)
    return [Path(folder).expanduser() for folder in found if folder]


def header(text: str) -> dict[str, str]:
    """Return the parts of the comment at the top of an experiment's file, by lower-case name."""
    parts = dict.fromkeys(PARTS, "")
    current = ""
    for line in takewhile(lambda line: line.startswith("#"), text.splitlines()):
        content = line.lstrip("#").strip()
        label, colon, rest = content.partition(":")
        if colon and label.lower() in PARTS:
            current, content = label.lower(), rest.strip()
        elif content.startswith("@package") or not current:
            continue
        parts[current] = f"{parts[current]} {content}".strip()
    return parts
