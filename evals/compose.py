"""From the command line to typed jobs: all of a sweep are composed and checked before one runs.

The jobs are the ones Hydra's basic sweeper will launch (its own splitting is used), each composed
with Hydra's node, held against the allow-list (``evals.safety``) and converted to the dataclasses
of ``evals.schema``. Importing this registers the schema and the resolver that conf/config.yaml
names. No MLX, no MLflow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from evals import config_files, overrides, safety
from evals.names import ConfigError, check_value, conf_dir, hints, nearest, options
from evals.record import results_root
from evals.schema import Config
from gear.config import GearConfig
from gear.methods import Method, load_method

CONFIG_NAME = "config"
_SETTING = re.compile(r"[+~]*(?!hydra)\w+\.[\w.]+=")
"""An override of one value, such as gear.rank=8; hydra.searchpath chooses files."""

ConfigStore.instance().store(name="base_config", node=Config, provider="gear-mlx")
# kept with the config, so that a job on another machine has the sweep's own folder
OmegaConf.register_new_resolver(
    "gear_root", lambda: str(results_root()), use_cache=True, replace=True
)


@dataclass(frozen=True)
class PlannedJob:
    """One job of a sweep: Hydra's config, its own node included, and ours."""

    cfg: DictConfig
    config: Config

    @property
    def words(self) -> list[str]:
        """Return the words that make this job alone."""
        return job_words(self.cfg.hydra.overrides)


@dataclass(frozen=True)
class Plan:
    """All that a command line asks for, checked; ``overrides`` include those of a sweep in YAML."""

    sweep: bool
    overrides: list[Override]
    jobs: list[PlannedJob]

    @property
    def configs(self) -> list[Config]:
        """Return the typed config of each job, in the order of launch."""
        return [job.config for job in self.jobs]


def plan(words: list[str], multirun: bool = False) -> Plan:
    """Compose and check every job that ``words`` (Hydra's overrides) ask for.

    Raises :class:`ConfigError` (or SettingError) for the first thing that cannot be used. Nothing
    is instantiated, computed or written.
    """
    with initialize_config_dir(str(conf_dir()), job_name="gear-eval", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        parser = OverridesParser.create(config_loader=loader)
        try:
            parsed = parser.parse_overrides(words)
        except HydraException as error:
            raise ConfigError(str(error)) from error
        folders = [conf_dir(), *_added_folders(parsed)]
        known = options(folders)
        overrides.check(parsed, known)
        master = _compose(loader, words, RunMode.MULTIRUN, folders)
        if not (multirun or master.hydra.mode == RunMode.MULTIRUN):
            overrides.check_single(parsed)
            return Plan(False, parsed, [PlannedJob(master, to_config(master))])
        inherited = [f"{key}={value}" for key, value in (master.hydra.sweeper.params or {}).items()]
        swept = parser.parse_overrides([*inherited, *master.hydra.overrides.task])
        overrides.check(swept, known)
        [batch] = BasicSweeper.split_arguments(swept, max_batch_size=None)
        common = list(master.hydra.overrides.hydra)
        return Plan(True, swept, [_job(loader, [*common, *job], folders) for job in batch])


def job_words(composed: Any) -> list[str]:
    """Return the words of one job from ``hydra.overrides``, its own values and not a sweep's.

    ``python run.py`` with them composes the job again, alone: each value that an experiment's own
    sweep varies is among them.
    """
    folders = [str(word) for word in composed.hydra if str(word).startswith("hydra.searchpath=")]
    return [*folders, *map(str, composed.task)]


def baseline_words(words: Iterable[str]) -> list[str]:
    """Return the words of the fp16 arm of the job that ``words`` make."""
    kept = [word for word in words if not re.match(r"\+{0,2}cache[=.]", word)]
    return [*kept, "cache=fp16"]


def _added_folders(parsed: list[Override]) -> list[Path]:
    """Return the folders that ``hydra.searchpath`` (``--config-dir``) adds."""
    found = [o.value() for o in parsed if o.key_or_group == "hydra.searchpath"]
    paths = [str(path) for value in found if isinstance(value, list) for path in value]
    return [Path(path.removeprefix("file://")) for path in paths if not path.startswith("pkg://")]


def _job(loader: ConfigLoader, words: list[str], folders: list[Path]) -> PlannedJob:
    """Compose and type one job."""
    cfg = _compose(loader, words, RunMode.RUN, folders)
    return PlannedJob(cfg, to_config(cfg))


def _compose(
    loader: ConfigLoader, words: list[str], mode: RunMode, folders: list[Path]
) -> DictConfig:
    """Check the YAML files that ``words`` choose, compose them, check the result."""
    # a value cannot change which files are read: the jobs of a sweep mostly choose the same ones
    choices = tuple(word for word in words if not _SETTING.match(word))
    try:
        for file, package in _files(loader, choices, mode, tuple(folders)):
            config_files.check_file(file, package)
        cfg = loader.load_configuration(
            CONFIG_NAME, words, mode, validate_sweep_overrides=mode == RunMode.RUN
        )
    except (HydraException, YAMLError) as error:
        raise ConfigError(_plainly(error)) from error
    safety.check(cfg)
    return cfg


@lru_cache(maxsize=8)
def _files(
    loader: ConfigLoader, choices: tuple[str, ...], mode: RunMode, folders: tuple[Path, ...]
) -> list[tuple[Path, str]]:
    """Return the YAML files that ``choices`` select, each with the package it goes to."""
    listed = loader.compute_defaults_list(CONFIG_NAME, list(choices), mode)
    found = []
    for default in listed.defaults:
        files = [folder / f"{default.config_path}.yaml" for folder in folders]
        if file := next((file for file in files if file.is_file()), None):
            found.append((file, default.package or ""))
    return found


def _plainly(error: Exception) -> str:
    """Say Hydra's error without its mechanism (search paths, how to append)."""
    text = str(error).partition("Config search path:")[0].strip()
    if not (key := re.search(r"Could not override '([\w.]+)'", text)):
        if "'hydra/launcher/" in text:
            text += "\nAll but basic come with: pip install -e '.[cluster]'"
        return f"{text}\n{str(error.__cause__ or '').partition(chr(10))[0]}".strip()
    group, _, option = key[1].partition(".")
    if group != "cache":
        return f"{key[1]}: there is no such setting. Hydra's own: python run.py --cfg hydra"
    owners = [name for name, known in overrides.method_options().items() if option in known]
    return f"{key[1]}: not an option of this cache, but of cache={', '.join(owners)}."


def to_config(cfg: DictConfig) -> Config:
    """Return the typed config of one composed job.

    ``cache`` stays a dict, ``{"_target_", "name", option: value…}``, each option of the type that
    the method's dataclass gives it and ``settings`` a GearConfig. Raises :class:`ConfigError`.
    """
    groups: dict[str, Any] = {}
    for name in hints(Config):
        if name == "cache":
            groups[name] = _cache(cfg)
            continue
        try:
            node = cfg[name]
            groups[name] = OmegaConf.to_object(node) if isinstance(node, DictConfig) else node
        except OmegaConfBaseException as error:
            raise ConfigError(f"{name}: {str(error).splitlines()[0]}") from error
    return Config(**groups)


def _cache(cfg: DictConfig) -> dict[str, Any]:
    """Return the cache node with its options typed by the method's dataclass."""
    node = cfg.cache
    typed: dict[str, Any] = {}
    known = hints(load_method(str(node.get("_target_"))))
    for key in node:
        option = str(key)
        if option == "settings" and "settings" in known:
            settings = OmegaConf.merge(OmegaConf.structured(GearConfig), node.settings)
            typed[option] = OmegaConf.to_object(settings)
        elif option in known or option in ("_target_", "name"):
            check_value(f"cache.{option}", node[key], known.get(option, str))
            typed[option] = node[key]
        else:
            raise ConfigError(
                f"cache.{option}: {node.name} has no such option.{nearest(option, known)}"
                f" Allowed: {', '.join(known) or 'none'}"
            )
    if not typed.get("name"):
        raise ConfigError("cache.name: must be the option's name, as tables show it.")
    return typed


def make_method(config: Config) -> Method:
    """Return the method of a typed config, its options set. Loads no MLX."""
    fields = {k: v for k, v in config.cache.items() if k not in ("_target_", "name")}
    return load_method(config.cache["_target_"])(**fields)
