"""What a config may name: one literal table, checked before Hydra instantiates anything.

``hydra.main`` builds callbacks, sweeper and launcher from the config, and Python's logging builds
handlers from it, before any code of ours runs; so the whole composed config, Hydra's node included,
is walked first. Interpolations may point at other settings and at the resolvers named here, which
keeps the environment (and its secrets) out of records. What can be seen in a YAML file only
as it is written is evals/config_files.py's. No MLX.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from evals.names import ConfigError
from evals.tracking_store import uri_problem
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
OF_INSTANTIATE = ("_args_", "_convert_", "_partial_", "_recursive_")
HANDLERS = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler")
OF_HANDLERS = ("class", "level", "formatter", "filters", "stream", "filename")
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
LOG_FILE = "${hydra.runtime.output_dir}/${hydra.job.name}.log"
_BUILT_BY_HYDRA = ("hydra.sweeper", "hydra.launcher", "hydra.job_logging", "hydra.hydra_logging")
_INTERPOLATION = re.compile(r"\$\{\s*([^:{}$]*)(.?)", re.DOTALL)


class UnsafeConfigError(ConfigError):
    """A config that names something outside the allow-list."""


def walk(value: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (path, key, value) of every entry below ``value``, lists by index."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in entries:
        yield path, str(key), item
        if isinstance(item, dict | list):
            yield from walk(item, f"{path}.{key}" if path else str(key))


def below(path: str, parents: tuple[str, ...]) -> bool:
    """Tell whether ``path`` is one of ``parents`` or inside one."""
    return any(path == parent or path.startswith(parent + ".") for parent in parents)


def check(cfg: DictConfig) -> None:
    """Raise :class:`UnsafeConfigError` where a composed config names what it must not.

    ``cfg`` is the whole config of one job, with its ``hydra`` node; nothing in it is resolved.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    hydra = plain.pop("hydra")  # last, so that a setting is named before the word that set it
    for path, key, value in walk({**plain, "hydra": hydra}):
        name = f"{path}.{key}" if path else key
        if key == "_target_":
            _check_target(path, value)
        elif key == "()":
            raise UnsafeConfigError(f"{name}={value!r}: factories ('()') are not allowed.")
        elif key in OF_INSTANTIATE:
            raise UnsafeConfigError(f"{name}={value!r}: {key} is not used here. Leave it out.")
        if isinstance(value, str):
            _check_interpolations(name, value)
    for parent in TARGETS:
        node = OmegaConf.select(cfg, parent, throw_on_resolution_failure=False)
        if not isinstance(node, DictConfig) or "_target_" not in node:
            raise UnsafeConfigError(f"{parent}: must hold a _target_ from its table, written out.")
    _check_hydra(hydra)
    check_uri(plain["tracking"]["uri"])


def check_uri(uri: str | None) -> None:
    """Raise :class:`ConfigError` for a ``tracking.uri`` that cannot be used or holds a secret."""
    if (problem := uri_problem(uri)) is not None:
        where, why, step = problem
        raise ConfigError(f"{where}: {why}. {step}")


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
    """Refuse what the table does not hold, and links out of what Hydra builds."""
    check_resolvers(name, text)
    for target, end in _INTERPOLATION.findall(text):
        target = target.strip()
        if end == "}" and below(name, _BUILT_BY_HYDRA) and not target.startswith("hydra."):
            raise UnsafeConfigError(f"{name}={text!r}: may refer to hydra.* only.")


def check_resolvers(name: str, text: str) -> None:
    """Refuse resolvers outside the table, and names that are built from names."""
    for target, end in _INTERPOLATION.findall(text):
        if end not in ("}", ":") or (end == ":" and target.strip() not in RESOLVERS):
            raise UnsafeConfigError(
                f"{name}={text!r}: only ${{setting}} and the resolvers {', '.join(RESOLVERS)} are"
                " allowed. Write the value itself; the shell expands its own variables."
            )


def _check_hydra(hydra: dict[str, Any]) -> None:
    """Check the parts of Hydra's node that are built or run without a ``_target_``."""
    if hydra.get("callbacks"):
        raise UnsafeConfigError("hydra.callbacks: must be empty.")
    job = hydra["job"]
    if job["env_copy"] or job["env_set"]:
        raise UnsafeConfigError(
            "hydra.job.env_copy, hydra.job.env_set: must be empty. Set variables in the shell."
        )
    if not re.fullmatch(r"\w[\w-]*", str(job["name"])):
        raise UnsafeConfigError(f"hydra.job.name={job['name']!r}: must be a plain name.")
    for path, key, value in walk(hydra["launcher"]):
        if not (key + str(value)).isprintable():  # a line of its own in the script of a batch job
            raise UnsafeConfigError(
                f"hydra.launcher.{path}.{key}={value!r}: must be one line of printable text."
            )
    for node in ("job_logging", "hydra_logging"):
        _check_logging(node, hydra[node])


def _check_logging(node: str, logging: Any) -> None:
    """Allow handlers that write to the terminal or to the log file of Hydra's own folder."""
    if isinstance(logging, str):
        raise UnsafeConfigError(f"hydra.{node}={logging!r}: must be written out.")
    for path, key, value in walk(logging or {}):
        name = f"hydra.{node}.{path}.{key}={value!r}"
        handler = re.fullmatch(r"handlers\.[^.]+", path) is not None
        if key == "class" and value not in (HANDLERS if handler else ()):
            raise UnsafeConfigError(f"{name}: handlers are {', '.join(HANDLERS)}.")
        if handler and key not in OF_HANDLERS:
            raise UnsafeConfigError(f"{name}: a handler has {', '.join(OF_HANDLERS)} only.")
        if handler and key == "filename" and value != LOG_FILE:
            raise UnsafeConfigError(f"{name}: the log file is {LOG_FILE}.")
        if isinstance(value, str) and "://" in value and value not in STREAMS:
            raise UnsafeConfigError(f"{name}: streams are {', '.join(STREAMS)}.")
