"""What a config may name: one literal table, checked before Hydra instantiates anything.

``hydra.main`` builds callbacks, sweeper and launcher from the config, and Python's logging builds
handlers from it, before any code of ours runs; so the whole composed config, Hydra's node included,
is walked first. Interpolations may point at other settings and at the resolvers named here, which
keeps the environment (and its secrets) out of records. YAML files are checked as text too: keys
that stand twice and aliases vanish once parsed. No MLX.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from evals.names import ConfigError, check_value, type_of
from gear.methods import METHODS

_PLUGINS = "hydra_plugins."
TARGETS: dict[str, tuple[str, ...]] = {
    "cache": tuple(METHODS.values()),
    "hydra.sweeper": ("hydra._internal.core_plugins.basic_sweeper.BasicSweeper",),
    "hydra.launcher": (
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        _PLUGINS + "hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
        _PLUGINS + "hydra_submitit_launcher.submitit_launcher.LocalLauncher",
        _PLUGINS + "hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
        _PLUGINS + "hydra_ray_launcher.ray_launcher.RayLauncher",
    ),
}
"""Where a ``_target_`` may stand, and its allowed values."""

RESOLVERS = ("now", "hydra", "gear_root", "python_version")
HANDLERS = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler")
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
_BUILT_BY_HYDRA = ("hydra.sweeper", "hydra.launcher", "hydra.job_logging", "hydra.hydra_logging")
_INTERPOLATION = re.compile(r"\$\{\s*([^:{}$]*)(.?)", re.DOTALL)


class UnsafeConfigError(ConfigError):
    """A config that names something outside the allow-list."""


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (path, key, value) of every entry below ``value``, lists by index."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in entries:
        yield path, str(key), item
        if isinstance(item, dict | list):
            yield from _walk(item, f"{path}.{key}" if path else str(key))


def _below(path: str, parents: tuple[str, ...]) -> bool:
    """Tell whether ``path`` is one of ``parents`` or inside one."""
    return any(path == parent or path.startswith(parent + ".") for parent in parents)


def check(cfg: DictConfig) -> None:
    """Raise :class:`UnsafeConfigError` where a composed config names what it must not.

    ``cfg`` is the whole config of one job, with its ``hydra`` node; nothing in it is resolved.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    hydra = plain.pop("hydra")  # last, so that a setting is named before the word that set it
    for path, key, value in _walk({**plain, "hydra": hydra}):
        name = f"{path}.{key}" if path else key
        if key == "_target_":
            _check_target(path, value)
        elif key == "()":
            raise UnsafeConfigError(f"{name}={value!r}: factories ('()') are not allowed.")
        if isinstance(value, str):
            _check_interpolations(name, value)
    for parent in TARGETS:
        node = OmegaConf.select(cfg, parent, throw_on_resolution_failure=False)
        if not isinstance(node, DictConfig) or "_target_" not in node:
            raise UnsafeConfigError(f"{parent}: must hold a _target_ from its table, written out.")
    _check_hydra(hydra)


def _check_target(path: str, value: Any) -> None:
    """Check one ``_target_``: its place and its value."""
    if path not in TARGETS:
        raise UnsafeConfigError(
            f"{path}._target_={value!r}: a _target_ may stand only in {', '.join(TARGETS)}."
        )
    if value not in TARGETS[path]:
        raise UnsafeConfigError(
            f"{path}._target_={value!r}: must be one of {', '.join(TARGETS[path])}."
        )


def _check_interpolations(name: str, text: str) -> None:
    """Refuse resolvers outside the table, names built from names, and links out of Hydra's node."""
    for target, end in _INTERPOLATION.findall(text):
        target = target.strip()
        if end not in ("}", ":") or (end == ":" and target not in RESOLVERS):
            raise UnsafeConfigError(
                f"{name}={text!r}: only ${{setting}} and the resolvers {', '.join(RESOLVERS)} are"
                " allowed. Write the value itself; the shell expands its own variables."
            )
        if end == "}" and _below(name, _BUILT_BY_HYDRA) and not target.startswith("hydra."):
            raise UnsafeConfigError(f"{name}={text!r}: may refer to hydra.* only.")


def _check_hydra(hydra: dict[str, Any]) -> None:
    """Check the parts of Hydra's node that are built or run without a ``_target_``."""
    if hydra.get("callbacks"):
        raise UnsafeConfigError("hydra.callbacks: must be empty.")
    job = hydra["job"]
    if job["env_copy"] or job["env_set"]:
        raise UnsafeConfigError(
            "hydra.job.env_copy, hydra.job.env_set: must be empty. Set variables in the shell."
        )
    for node in ("job_logging", "hydra_logging"):
        logging = hydra[node]
        if isinstance(logging, str):
            raise UnsafeConfigError(f"hydra.{node}={logging!r}: must be written out.")
        for path, key, value in _walk(logging or {}):
            allowed = HANDLERS if key == "class" and path.startswith("handlers.") else ()
            if key == "class" and value not in allowed:
                raise UnsafeConfigError(
                    f"hydra.{node}.{path}.class={value!r}: handlers are {', '.join(HANDLERS)}."
                )
            if isinstance(value, str) and "://" in value and value not in STREAMS:
                raise UnsafeConfigError(
                    f"hydra.{node}.{path}.{key}={value!r}: streams are {', '.join(STREAMS)}."
                )


def check_file(path: Path, package: str) -> None:
    """Check one YAML file as written; ``package`` is where Hydra puts it (``gear``, or empty).

    Raises :class:`ConfigError` naming the file and line for a key that stands twice or an alias,
    and the file and setting for a wrong name or a value of another type than the schema's.
    """
    _check_text(path, package, path.read_text(encoding="utf-8"))


@cache
def _check_text(path: Path, package: str, text: str) -> None:
    """Check the text of a file, once for all jobs of a sweep."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise UnsafeConfigError(f"{path}: YAML aliases (*name) are not used; write ${{setting}}.")
    _check_duplicates(path, root)
    content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    below = [part for part in package.split(".") if part not in ("", "_global_")]
    if below[:1] == ["hydra"] or not isinstance(content, dict):
        return
    if below[:1] == ["experiment"]:
        raise ConfigError(f"{path}: an experiment begins with the line '# @package _global_'.")
    try:
        for key, value in content.items():
            if key != "defaults" and (below or key != "hydra"):
                name = [*below, str(key)]
                check_value(".".join(name), value, type_of(name))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_duplicates(path: Path, node: yaml.Node) -> None:
    """Refuse a mapping with the same key twice, at any depth; later ones would win silently."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if str(key.value) in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"{path}:{line}: the key {key.value!r} stands twice.")
            seen.add(str(key.value))
            _check_duplicates(path, value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_duplicates(path, item)
