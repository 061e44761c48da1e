"""The command line's ``key=value`` words: checked name by name before Hydra composes anything.

Hydra's own answers to a wrong word are about its mechanism (``append with +``); these say which
setting, option or form was meant. Sweeps are checked value by value. No MLX.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString

from evals.names import ConfigError, check_value, hints, nearest, setting_names, type_of
from evals.safety import check_uri
from gear.methods import METHODS, load_method

BY_LAYER = "gear.by_layer"
BASE_OPTIONS = ("gear.base_options", "gear.k.base_options", "gear.v.base_options")
BY_LAYER_FORM = "'+gear.by_layer={10: {k: {bits: 4}}}'"


def method_options() -> dict[str, list[str]]:
    """Return the option names of every method, by method, without ``settings`` (that is gear=)."""
    return {
        name: [option for option in hints(load_method(target)) if option != "settings"]
        for name, target in METHODS.items()
    }


def values(override: Override) -> list[Any]:
    """Return every value an override takes: one, or each of a sweep."""
    if not override.is_sweep_override():
        return [override.value()]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: an interval has no list of values."
            f" Write {override.key_or_group}=4,8,16 or range(start,stop,step)."
        )
    return [v.text if isinstance(v, QuotedString) else v for v in override.sweep_iterator()]


def check_single(overrides: Iterable[Override]) -> None:
    """Raise :class:`ConfigError` for a word with several values, which only a sweep can take."""
    for override in overrides:
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: several values make a sweep; add -m.")


def check(overrides: Iterable[Override], options: dict[str, list[str]]) -> None:
    """Raise :class:`ConfigError` for the first word that names no setting, option or right type.

    ``options`` are the groups (:func:`evals.names.options`). Words for Hydra itself (``hydra.…``)
    are left to Hydra and to the allow-list.
    """
    for override in overrides:
        key, found = override.key_or_group, values(override)
        if override.is_hydra_override():
            if override.is_sweep_override():
                raise ConfigError(f"{override.input_line}: Hydra's own settings are not swept.")
            _check_search_path(key, found)
            continue
        if override.is_delete() or override.package is not None:
            raise ConfigError(
                f"{override.input_line}: settings are not removed or moved."
                " Choose another option (tracking=none) or another value (null)."
            )
        if key in options and not any(isinstance(value, dict) for value in found):
            _check_choice(override, found, options[key])
        else:
            _check_setting(override, found, options)


def _check_search_path(key: str, found: list[Any]) -> None:
    """Refuse config folders that are Python packages: finding one imports it."""
    listed = [path for value in found if isinstance(value, list) for path in value]
    for path in listed if key == "hydra.searchpath" else ():
        if "://" in str(path) and not str(path).startswith("file://"):
            raise ConfigError(f"{key}: {path}: must be a folder. Use --config-dir FOLDER.")


def _check_choice(override: Override, found: list[Any], allowed: list[str]) -> None:
    """Check ``group=option``."""
    group = override.key_or_group
    for value in found:
        if value not in allowed:
            raise ConfigError(
                f"{group}={'' if value is None else value}: there is no such option."
                f"{nearest(str(value), allowed)} Available: {', '.join(allowed)}"
            )
    if override.is_add() or override.is_force_add():
        raise ConfigError(f"{override.input_line}: write it without the +: {group}={found[0]}")


def _check_setting(override: Override, found: list[Any], options: dict[str, list[str]]) -> None:
    """Check ``group.field=value``."""
    key = override.key_or_group
    path = key.split(".")
    if len(path) == 1 and (path[0] not in setting_names()):
        raise ConfigError(
            f"{override.input_line}: there is no such setting or group."
            f"{nearest(key, [*options, *setting_names()])} All names: python run.py --help"
        )
    hint = type_of(path)
    for value in found:
        if key == "tracking.uri" and isinstance(value, str):
            check_uri(value)  # first: what is said of another mistake repeats the word
        check_value(key, value, hint)
    added = override.is_add() or override.is_force_add()
    if path[:2] == BY_LAYER.split(".") and (key != BY_LAYER or not added):
        raise ConfigError(f"{override.input_line}: write one mapping with a +: {BY_LAYER_FORM}")
    if path[0] == "cache":
        _check_method_option(override, path)
    elif key.startswith(BASE_OPTIONS):
        _check_base_options(override, key)
    elif override.is_add() and key != BY_LAYER:
        raise ConfigError(f"{override.input_line}: {key} exists, so write it without the +.")


def _check_method_option(override: Override, path: list[str]) -> None:
    """Check ``cache.option=value`` against all methods; composing says if the chosen one has it."""
    if len(path) == 1 or path[1] == "_target_":
        raise ConfigError(f"{override.input_line}: the method is chosen with cache=NAME.")
    if path[1] == "settings":
        setting = ".".join(["gear", *path[2:]])
        raise ConfigError(f"{override.input_line}: these are GEAR's numbers. Write {setting}=….")
    known = sorted({option for listed in method_options().values() for option in listed})
    if path[1] not in (*known, "name"):
        raise ConfigError(
            f"{'.'.join(path)}: no method has such an option.{nearest(path[1], known)}"
            f" Allowed: {', '.join(known)}"
        )


def _check_base_options(override: Override, key: str) -> None:
    """Demand the + that a new name in a mapping takes; which names there are the base says."""
    if not override.is_add():
        place = next(name for name in sorted(BASE_OPTIONS, key=len) if key.startswith(name))
        raise ConfigError(
            f"{override.input_line}: write a base's options with a +:"
            f" +{place}.NAME=value, or '+{place}={{NAME: value}}'"
        )
