"""Every name a person may type: settings (the schema as a tree) and options (the YAML files).

Hydra and OmegaConf convert silently (the text "4" becomes the number 4, an unknown key with ``+``
becomes a new field). Here a value keeps the type it was written with and a wrong name is answered
with the nearest right one. No MLX, no Hydra.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from evals.schema import Config

WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


NAME = re.compile(r"[^\W_][\w .+:()/-]*")
"""A name that people read: no markup, no path upwards, no formula of a spreadsheet."""


class ConfigError(ValueError):
    """A command line or YAML file that cannot be used; the text says what to write instead."""


def conf_dir() -> Path:
    """Return the folder of YAML files: packed into the wheel, or the checkout's conf/."""
    here = Path(__file__).resolve().parent
    return here / "_conf" if (here / "_conf").is_dir() else here.parent / "conf"


def options(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return the options of every group in the config folders, nested ones as ``hub/name``."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/**/*.yaml"):
            group, *rest = path.relative_to(folder).with_suffix("").parts
            if group != "hydra":
                found.setdefault(group, set()).add("/".join(rest))
    return {group: sorted(names) for group, names in sorted(found.items())}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean X?`` for the name closest to ``name``, or an empty string."""
    known = list(known)
    tails = {path.rpartition(".")[2]: path for path in reversed(known)}
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not found:  # the right field in the wrong place, or without its group: rnak=8
        field = difflib.get_close_matches(name.rpartition(".")[2], tails, n=1, cutoff=0.6)
        found = [tails[tail] for tail in field]
    return f" Did you mean {found[0]}?" if found else ""


def hints(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, by name."""
    resolved = typing.get_type_hints(cls)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls)}


def setting_names(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted name below a dataclass: ``gear``, ``gear.rank``, ``gear.k.bits``, …"""
    for name, hint in hints(cls).items():
        yield prefix + name
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from setting_names(hint, f"{prefix}{name}.")


def type_of(path: list[str]) -> Any:
    """Return the type of the setting at ``path``; raise :class:`ConfigError` for a wrong name.

    Below ``cache`` everything is ``Any``: the method's own dataclass types it.
    """
    hint: Any = Config
    for depth, key in enumerate(path):
        if hint is Any:
            return Any
        if typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type) and key in hints(hint):
            hint = hints(hint)[key]
        else:
            name = ".".join(path[: depth + 1])
            raise ConfigError(
                f"{name}: there is no such setting.{nearest('.'.join(path), setting_names())}"
                " All names: python run.py --help"
            )
    return hint


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def describe(hint: Any) -> str:
    """Say a type in words: ``an integer or null``."""
    options = [o for o in _options(hint) if o is not types.NoneType]
    return " or ".join(
        [_word(o) for o in options] + ["null"] * (len(options) < len(_options(hint)))
    )


def _word(kind: Any) -> str:
    """Say one type in words: ``a list, each of them an integer``."""
    if typing.get_origin(kind) is list:
        return f"a list, each of them {_word(typing.get_args(kind)[0])}"
    return WORDS.get(kind, "a mapping of names to values")


def _fits(value: Any, kind: Any) -> bool:
    """Tell whether a scalar was written as ``kind``; an integer is a number and may be text."""
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int):
        return kind in (int, float, str)
    return kind is type(value)


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raise :class:`ConfigError` where ``value`` was not written in the type of setting ``name``.

    Interpolations (``${gear}``) and ``???`` pass: OmegaConf types those.
    """
    options = _options(hint)
    if Any in options or (value is None and types.NoneType in options):
        return
    if isinstance(value, str) and ("${" in value or value == "???"):
        return
    if isinstance(value, dict):
        for kind in options:
            if typing.get_origin(kind) is dict or dataclasses.is_dataclass(kind):
                _check_mapping(name, value, kind)
                return
    lists = [kind for kind in options if typing.get_origin(kind) is list]
    if isinstance(value, list) and lists:
        for index, item in enumerate(value):
            check_value(f"{name}[{index}]", item, typing.get_args(lists[0])[0])
        return
    if any(_fits(value, kind) for kind in options):
        return
    quote = " Text that looks otherwise is quoted twice: 'key=\"value\"'" * (str in options)
    raise ConfigError(f"{name}={value!r}: must be {describe(hint)}.{quote}")


def check_name(field: str, name: str) -> None:
    """Raise :class:`ConfigError` for a name that a table, a page or a folder could misread."""
    if not NAME.fullmatch(name) or ".." in name or len(name) > 100:
        raise ConfigError(
            f"{field}={name[:100]!r}: must begin with a letter or digit; then letters, digits,"
            " spaces and . _ + - : ( ) / are allowed, no '..', at most 100 characters."
        )


def _check_mapping(name: str, value: dict[Any, Any], kind: Any) -> None:
    """Check each entry of a mapping that stands for a dataclass or a typed dict."""
    if typing.get_origin(kind) is dict:
        key_type, value_type = typing.get_args(kind)
        for key, item in value.items():
            if not _fits(key, key_type) and key_type is not Any:
                raise ConfigError(f"{name}: the key {key!r} must be {describe(key_type)}.")
            check_value(f"{name}.{key}", item, value_type)
        return
    known = hints(kind)
    for key, item in value.items():
        if key not in known:
            raise ConfigError(
                f"{name}.{key}: there is no such setting.{nearest(str(key), known)}"
                f" Allowed: {', '.join(known)}"
            )
        check_value(f"{name}.{key}", item, known[key])
