"""Where the YAML files are, and which name was meant."""

from pathlib import Path

import pytest

from evals import names
from evals.names import ConfigError, check_value, conf_dir, nearest, options, type_of


def test_the_checkout_has_conf_and_a_wheel_brings_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert conf_dir() == Path(__file__).resolve().parents[2] / "conf"
    (tmp_path / "evals/_conf").mkdir(parents=True)
    monkeypatch.setattr(names, "__file__", str(tmp_path / "evals/names.py"))
    assert conf_dir() == tmp_path / "evals/_conf"


def test_options_are_the_files_of_every_folder_nested_ones_by_path(tmp_path: Path) -> None:
    for file in ("a/model/x.yaml", "a/model/hub/y.yaml", "b/model/z.yaml", "a/config.yaml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("", encoding="utf-8")
    assert options([tmp_path / "a", tmp_path / "b"]) == {"model": ["hub/y", "x", "z"]}


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("gear.rnak", ["gear.rank", "gear.bits"], "gear.rank"),
        ("rnak", ["gear.bits", "gear.rank"], "gear.rank"),
        ("model.rank", ["gear.rank", "eval.chunk"], "gear.rank"),
        ("zzz", ["gear.rank"], None),
    ],
)
def test_nearest(name: str, known: list[str], meant: str | None) -> None:
    assert nearest(name, known) == (f" Did you mean {meant}?" if meant else "")


@pytest.mark.parametrize("value", ["${gear.bits}", "???", None, 3])
def test_what_passes_for_an_integer_or_null(value: object) -> None:
    check_value("gear.n_b", value, type_of(["gear", "n_b"]))


@pytest.mark.parametrize("value", ["3", 3.0, True, [3], {"a": 3}])
def test_what_does_not(value: object) -> None:
    with pytest.raises(ConfigError, match=r"gear\.n_b=.*an integer or null"):
        check_value("gear.n_b", value, type_of(["gear", "n_b"]))
