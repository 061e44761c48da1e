"""The text of ``python run.py --help``: read from the YAML headers and the dataclasses themselves.

Every group with its options, every field with type, default and docstring. Nothing is composed and
neither Hydra nor MLX is imported, so it takes well under two seconds.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import yaml

from evals.names import hints
from evals.schema import Config
from gear.methods import METHODS, load_method

WIDTH = 100

INTRO = """\
How much does a compressed KV cache change what a language model predicts? One command evaluates a
model through a packed cache against the exact one (fp16 is always there) and shows it in MLflow.

usage: python run.py [group=option …] [field=value …] [-m]      (installed: gear-eval …)
"""

EXAMPLES = """\
Examples
  python run.py                                       GEAR at 2 bits on the bundled model and text
  python run.py cache=kivi gear.group_size=32         another method, another number
  python run.py gear.rank=4,8,16 -m                   a sweep: one row each, one fp16 arm
  python run.py cache=fp16,kivi,gear_l,gear gear=gear_2bit,gear_4bit -m
  python run.py 'cache=glob(*)' -m                    every method
  python run.py model=local model.path=FOLDER dataset=file dataset.path=FILE
  python run.py '+gear.by_layer={10: {k: {bits: 4}}}' K of layer 10 at 4 bits
  python run.py experiment=smoke                      a recorded question with its sweep
The same command again computes nothing that is done: it resumes, and shows the same table.
"""

OUTRO = """\
Other commands
  python scripts/fetch_models.py    fetch and convert the bundled model, once
  python scripts/ui.py              open the MLflow page of the results
  python scripts/sync_mlflow.py     write records into MLflow that are not there yet

Hydra's own arguments
  -m, --multirun    run a sweep          --cfg job         print the config instead of running
  --config-dir DIR  add your own YAML    --info, --hydra-help, --version
  hydra/launcher=   basic; joblib, submitit or ray where its plugin is installed

Environment
  GEAR_MLRUNS       results root (records, MLflow); default: the checkout's mlruns, else ./mlruns
  GEAR_ASSETS       folder of converted models; default: the user's cache folder
  GEAR_BLAS         Linux CPU: the CBLAS library that MLX is given
  HYDRA_FULL_ERROR  1: stack traces instead of short messages
  NO_COLOR          any value: no colour

Exit codes: 0 done, 1 a job failed, 2 the command line or a setting cannot be used, 130 interrupted.
"""


def text(conf: Path) -> str:
    """Return the whole help; ``conf`` is the folder of YAML files."""
    parts = [INTRO, EXAMPLES, "Groups: group=option, * marks the default", *_groups(conf), ""]
    parts += ["Fields: field=value", "", *_fields(Config), *_method_fields(), "", OUTRO]
    return "\n".join(parts)


def default_options(conf: Path) -> dict[str, str | None]:
    """Return the default option of each group, in the order of conf/config.yaml."""
    found: dict[str, str | None] = {}
    for entry in yaml.safe_load((conf / "config.yaml").read_text(encoding="utf-8"))["defaults"]:
        if isinstance(entry, dict):
            found |= {k: v for k, v in entry.items() if not k.startswith("override ")}
    return found


def header(path: Path) -> str:
    """Return the first sentence of a YAML file's leading comment, ``@package`` lines left out."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines())
    comment = " ".join(line.strip("# ") for line in lines if "@package" not in line).strip()
    return re.split(r"(?<=[.?]) ", comment)[0]


def _groups(conf: Path) -> Iterator[str]:
    """Yield the lines of every group and its options."""
    for group, default in default_options(conf).items():
        yield f"  {group}="
        folder = conf / group
        for path in sorted(folder.rglob("*.yaml")):
            option = path.relative_to(folder).with_suffix("").as_posix()
            mark = "*" if option == default else " "
            yield from _wrapped(f"  {mark} {option:<18} ", header(path))


def _wrapped(first: str, doc: str) -> list[str]:
    """Return ``first`` with ``doc`` beside it, wrapped under itself."""
    return textwrap.wrap(doc, WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [
        first.rstrip()
    ]


def docstrings(cls: type) -> dict[str, str]:
    """Return the docstring written below each attribute of a class, its bases included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        [body] = [
            node.body
            for node in ast.walk(ast.parse(inspect.getsource(sys.modules[base.__module__])))
            if isinstance(node, ast.ClassDef) and node.name == base.__name__
        ]
        for field, below in pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _fields(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the lines of every field below a dataclass, nested ones by their dotted names."""
    docs, types = docstrings(cls), hints(cls)
    for field in dataclasses.fields(cls):
        name, hint = prefix + field.name, types[field.name]
        if field.name == "cache" and cls is Config:
            continue  # listed by method
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _nested(name, hint, docs.get(field.name, ""))
            continue
        yield f"  {name}: {field.type} = {_shown(field)}"
        yield from _wrapped("      ", docs.get(field.name, ""))


def _nested(name: str, cls: type, doc: str) -> Iterator[str]:
    """Yield a nested dataclass: its documented fields, or one line where they only repeat names."""
    if docstrings(cls):
        about = (inspect.getdoc(cls) or "").splitlines()[0]
        yield about if about.startswith(name) else f"{name}=: {about}"
        yield from [*_fields(cls, f"{name}."), ""]
        return
    yield from _wrapped("  ", ", ".join(f"{name}.{field}" for field in hints(cls)))
    yield from _wrapped("      ", doc)


def _method_fields() -> Iterator[str]:
    """Yield the lines of every method's own options."""
    yield from ["", "cache=: the method's own options; GEAR's family takes the numbers of gear=."]
    for method, target in METHODS.items():
        cls = load_method(target)
        docs = docstrings(cls)
        for field in dataclasses.fields(cls):
            if field.name != "settings":
                shown = f"{field.type} = {_shown(field)}"
                yield f"  cache.{field.name}: {shown}    (cache={method})"
                yield from _wrapped("      ", docs.get(field.name, ""))


def _shown(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as one would type it."""
    if field.default is dataclasses.MISSING:
        return "{}" if field.default_factory is not dataclasses.MISSING else "(required)"
    if field.default is None or isinstance(field.default, bool):
        return {None: "null", True: "true", False: "false"}[field.default]
    return "(from the option)" if field.default == "???" else str(field.default)
