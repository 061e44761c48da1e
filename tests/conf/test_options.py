"""Every YAML in conf/ composes into typed jobs and says what it is; experiments: the next file."""

from pathlib import Path

import pytest

from evals.compose import make_method, plan
from evals.help import default_options, header
from evals.names import conf_dir, hints, options
from evals.validate import check_plan
from gear.methods import METHODS, load_method

CONF = conf_dir()
GROUPS = {group: names for group, names in options([CONF]).items() if group != "experiment"}
CHOICES = [(group, name) for group, names in GROUPS.items() for name in names]
NEEDS = {
    "port_2bit": ["eval.prefill=streaming"],  # its passes see their own tokens compressed
    "downstream": ["dataset=passkey"],
}


@pytest.mark.parametrize(("group", "option"), CHOICES, ids=map("=".join, CHOICES))
def test_every_option_composes_and_types(group: str, option: str) -> None:
    planned = plan([f"{group}={option}", *NEEDS.get(option, [])])
    assert check_plan(planned) == []
    assert len(header(CONF / group / f"{option}.yaml")) > 10
    for job in planned.jobs:
        assert job.cfg.hydra.runtime.choices[group] == option
        assert make_method(job.config).plan(2) is not None
        if group != "gear":
            assert job.cfg[group].name == option


def test_every_group_is_in_the_table_of_contents_with_a_default_that_exists() -> None:
    defaults = default_options(CONF)
    assert set(defaults) == set(options([CONF]))
    assert list(defaults).index("eval") < list(defaults).index("dataset")
    for group, option in defaults.items():
        assert option is None or option in options([CONF])[group]


@pytest.mark.parametrize("name", options([CONF])["cache"])
def test_a_cache_yaml_lists_every_option_of_its_method(name: str) -> None:
    [config] = plan([f"cache={name}"]).configs
    assert config.cache["name"] == name
    target = config.cache["_target_"]
    assert target in METHODS.values()
    assert set(config.cache) == {"_target_", "name", *hints(load_method(target))}


def test_every_method_has_a_yaml_of_its_name() -> None:
    """Variants (bits) have others, which begin with the method's."""
    names = options([CONF])["cache"]
    assert set(METHODS) <= set(names)
    assert all(any(name.startswith(method) for method in METHODS) for name in names)


def test_the_presets_mean_what_the_paper_runs() -> None:
    [two] = plan(["gear=gear_2bit"]).configs
    [four] = plan(["gear=gear_4bit"]).configs
    assert (two.gear.bits, two.gear.base, make_method(two).block_tokens()) == (2, "grouped", 64)
    assert (four.gear.bits, four.gear.base, make_method(four).block_tokens()) == (4, "vector", 20)
    assert (two.gear.rank, two.gear.rank_decode, two.gear.sparse_frac) == (4, 2, 0.02)


def _folder(tmp_path: Path, file: str, text: str) -> str:
    """Write a YAML file of one's own and return the word that adds its folder."""
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return f'hydra.searchpath=["file://{tmp_path}"]'


def test_a_dataset_brings_its_protocol_and_the_command_line_still_wins(tmp_path: Path) -> None:
    text = "defaults:\n  - override /eval@_global_.eval: prefix\n\nname: own\nsource: embedded\n"
    word = _folder(tmp_path, "dataset/own.yaml", text)
    assert [c.eval.name for c in plan([word, "dataset=own"]).configs] == ["prefix"]
    assert [c.eval.name for c in plan([word, "dataset=own", "eval=oneshot"]).configs] == ["oneshot"]


def test_the_form_that_config_yaml_warns_of_does_not_compose(tmp_path: Path) -> None:
    text = "defaults:\n  - override /eval: prefix\n\nname: own\nsource: embedded\n"
    word = _folder(tmp_path, "dataset/own.yaml", text)
    with pytest.raises(ValueError, match="eval@dataset"):
        plan([word, "dataset=own"])
