"""Every YAML in conf/ composes into typed jobs, says what it is, and every experiment validates."""

from pathlib import Path

import pytest

from evals.compose import make_method, plan
from evals.help import default_options, header
from evals.names import conf_dir, hints, options
from evals.validate import check_plan
from gear.methods import METHODS, load_method

CONF = conf_dir()
CHOICES = [(group, name) for group, names in options([CONF]).items() for name in names]
NEEDS = {
    "port_2bit": ["eval.prefill=streaming"],  # its passes see their own tokens compressed
    "downstream": ["dataset=passkey"],
}
EXPERIMENTS = options([CONF])["experiment"]


@pytest.mark.parametrize(("group", "option"), CHOICES, ids=map("=".join, CHOICES))
def test_every_option_composes_and_types(group: str, option: str) -> None:
    planned = plan([f"{group}={option}", *NEEDS.get(option, [])])
    assert check_plan(planned) == []
    assert len(header(CONF / group / f"{option}.yaml")) > 10
    for job in planned.jobs:
        assert job.cfg.hydra.runtime.choices[group] == option
        assert make_method(job.config).plan(2) is not None
        if group not in ("gear", "experiment"):
            assert job.cfg[group].name == option


def test_every_group_is_in_the_table_of_contents_with_a_default_that_exists() -> None:
    defaults = default_options(CONF)
    assert set(defaults) == set(options([CONF]))
    assert list(defaults).index("eval") < list(defaults).index("dataset")
    for group, option in defaults.items():
        assert option is None or option in options([CONF])[group]


@pytest.mark.parametrize("name", METHODS)
def test_a_cache_yaml_lists_every_option_of_its_method(name: str) -> None:
    [config] = plan([f"cache={name}"]).configs
    assert config.cache["_target_"] == METHODS[name]
    assert set(config.cache) == {"_target_", "name", *hints(load_method(METHODS[name]))}
    assert options([CONF])["cache"] == sorted(METHODS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_states_question_command_cost_expectation_and_rule(name: str) -> None:
    text = (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
    for part in ("Question", "Command", "Takes", "Expected", "Decision"):
        assert f"# {part}:" in text
    assert f"experiment={name}" in text.partition("# Command:")[2].splitlines()[0]


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
