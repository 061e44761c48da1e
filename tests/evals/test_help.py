"""--help names everything a person may type, and imports nothing heavy for it."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from evals import help as help_text
from evals.names import conf_dir, options, setting_names
from evals.schema import Config
from gear.config import GearConfig
from gear.methods.mlx_quant import MlxQuant

HELP = help_text.text(conf_dir())


@pytest.mark.parametrize(
    ("group", "name"), [(g, n) for g, names in options([conf_dir()]).items() for n in names]
)
def test_every_option_is_there_with_its_header(group: str, name: str) -> None:
    first = help_text.header(conf_dir() / group / f"{name}.yaml").split()[:4]
    below = HELP.partition(f"\n  {group}=\n")[2]
    [line] = [row for row in below.splitlines() if row.strip("* ").split()[:1] == [name]][:1]
    assert line.strip("* ").split()[1:5] == first


@pytest.mark.parametrize("name", [n for n in setting_names() if n != "cache"])
def test_every_setting_is_there(name: str) -> None:
    assert name in HELP


def test_fields_show_type_default_and_docstring() -> None:
    assert "  gear.rank: int | None = 4\n      Rank of L·R in prefill blocks; 0 = no" in HELP
    assert "  gear.clip: bool = false\n" in HELP
    assert "  cache.group_size: int = 64    (cache=mlx_quant)\n      Channels that share" in HELP


@pytest.mark.parametrize("cls", [GearConfig, MlxQuant, *map(type, vars(Config()).values())])
def test_every_field_of_a_group_has_a_docstring(cls: type) -> None:
    if cls.__module__ != "builtins":
        assert set(help_text.docstrings(cls)) >= {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("word", ["GEAR_MLRUNS", "GEAR_ASSETS", "HYDRA_FULL_ERROR", "NO_COLOR"])
def test_the_environment_is_explained(word: str) -> None:
    assert f"\n  {word}" in HELP


def test_defaults_are_marked() -> None:
    assert "* gear_2bit" in HELP
    assert "* gear_4bit" not in HELP


def test_help_imports_neither_hydra_nor_mlx_nor_mlflow() -> None:
    code = (
        "import sys; sys.argv = ['run.py', '--help']; from evals.cli import main; code = main();"
        "heavy = {'hydra', 'mlx', 'mlflow', 'datasets', 'numpy'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False)  # noqa: S603
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == HELP
