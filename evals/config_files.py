"""YAML files as they are written, looked at before Hydra makes anything of them.

Keys that stand twice and aliases (a few lines of which unfold to gigabytes) vanish once parsed, and
a defaults list is resolved while it is read; so importing this puts a check into Hydra's own reader
of files. A file that is not of conf/ may set less than a person may type. No MLX.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from evals.names import ConfigError, check_value, conf_dir, type_of
from evals.safety import UnsafeConfigError, below, check_resolvers, walk

HYDRA_IN_FILES = ("mode", "sweeper", "launcher", "job_logging", "hydra_logging")
"""What of Hydra's node a file outside conf/ may set; the rest is for the command line."""
LAUNCHER_IN_FILES = (
    "_target_", "n_jobs", "timeout_min", "nodes", "tasks_per_node", "cpus_per_task", "mem_gb",
    "gpus_per_node", "gpus_per_task", "cpus_per_gpu", "mem_per_cpu", "mem_per_gpu", "name",
    "partition", "qos", "account", "constraint", "exclude", "gres", "array_parallelism",
    "max_num_timeout", "signal_delay_s",
)  # fmt: skip
"""Sizes and queues. What runs commands or connects (setup, ray.init.address, …) is typed."""
MAX_DEPTH = 40
"""Levels of a YAML file; the deepest of ours has 5."""


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's reader of YAML files, which now looks at a text before anything is made of it.

    It has the name of the class whose place it takes: Hydra refuses another one there.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the file as Hydra does. Raises :class:`ConfigError` for what :func:`tree` does."""
        path = Path(self.path) / self._normalize_file_name(config_path)
        if path.is_file():
            tree(path)
        return super().load_config(config_path)


SourcesRegistry.instance().types["file"] = FileConfigSource


def check_file(path: Path, package: str) -> None:
    """Check one YAML file as written; ``package`` is where Hydra puts it (``gear``, or empty).

    Raises :class:`ConfigError` naming the file and line for a key that stands twice or an alias,
    and the file and setting for a wrong name or a value of another type than the schema's.
    """
    if tree(path) is not None:
        _check_text(path, package, path.read_text(encoding="utf-8"))


@cache
def _check_text(path: Path, package: str, text: str) -> None:
    """Check the text of a file, once for all jobs of a sweep."""
    content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    if not isinstance(content, dict):
        return
    place = [part for part in package.split(".") if part not in ("", "_global_")]
    if not path.resolve().is_relative_to(conf_dir().resolve()):
        _check_added(path, place, content)
    if place[:1] == ["hydra"]:
        return
    if place[:1] == ["experiment"]:
        raise ConfigError(f"{path}: an experiment begins with the line '# @package _global_'.")
    try:
        for key, value in content.items():
            if key != "defaults" and (place or key != "hydra"):
                name = [*place, str(key)]
                check_value(".".join(name), value, type_of(name))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_added(path: Path, place: list[str], content: dict[Any, Any]) -> None:
    """Refuse what only a person may set: other folders, commands, servers."""
    nested: Any = content
    for part in reversed(place):
        nested = {part: nested}
    for where, key, value in walk(nested):
        if where == "hydra.sweeper.params":  # the words of a command
            name = key.lstrip("+~")
            refused = name.startswith(("hydra", "tracking"))
        elif where == "hydra.launcher" or below(where, ("hydra.launcher",)):
            name = f"{where}.{key}"
            refused = name.removeprefix("hydra.launcher.") not in LAUNCHER_IN_FILES
        else:
            name = f"{where}.{key}" if where else key
            refused = where == "hydra" and key not in HYDRA_IN_FILES
            local = value is None or str(value).startswith("sqlite:///")
            refused = refused or (name == "tracking.uri" and not local)
        if refused:
            raise UnsafeConfigError(
                f"{path}: {name}: is not set in a file from elsewhere. Write it on the command"
                " line, where whoever runs it sees it."
            )


def tree(path: Path) -> yaml.Node | None:
    """Return the YAML tree of a file, nothing built from it; None for an empty file.

    Raises :class:`ConfigError` with file and line for an alias, a key that stands twice, a tag of
    Python's, a resolver that is not in the table, or more levels than ``MAX_DEPTH``.
    """
    try:
        return _tree(path, path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error


@cache
def _tree(path: Path, text: str) -> yaml.Node | None:
    """Return the tree of a text, checked once."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        where = f"{path}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise UnsafeConfigError(
                f"{where}: YAML aliases (*name) are not used; write ${{setting}}."
            )
        if "python" in str(getattr(event, "tag", None)):
            raise UnsafeConfigError(f"{where}: {event.tag}: tags of Python are not allowed.")
        if isinstance(event, yaml.ScalarEvent):
            check_resolvers(where, event.value)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise UnsafeConfigError(f"{where}: more than {MAX_DEPTH} levels.")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        _check_duplicates(path, root)
    return root


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
