"""The experiments of conf/experiment: headers, settings, unique cells, and the paper's tables."""

from __future__ import annotations

import sys
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from evals import cli, dry_run
from evals.cells import cells
from evals.compose import Plan, plan
from evals.experiments import PARTS, experiment, header, named_in
from evals.job import build_method
from evals.names import ConfigError, conf_dir, options
from evals.schema import Config
from evals.validate import check_plan

EXPERIMENTS = options([conf_dir()])["experiment"]
LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128


HERE = ["model=tiny", "dataset=embedded", "eval=decode"]
"""A model and a text that are in the checkout, in place of an experiment's own."""


@cache
def planned_of(name: str) -> Plan:
    """Return an experiment's jobs, composed once: a hundred of them take a while."""
    return plan([f"experiment={name}"])


def jobs(name: str) -> list[Config]:
    """Return the typed jobs of an experiment."""
    return planned_of(name).configs


def method(config: Config) -> tuple[str, str]:
    """Return a job's method and all that it resolves to."""
    return config.cache["name"], str(build_method(config.cache).plan(2))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_header_has_all_five_parts(name: str) -> None:
    told = experiment(name)
    for part in PARTS:
        text = getattr(told, part)
        assert len(text) > 20, f"{name}: {part}"
        assert "TODO" not in text
    assert told.command == f"python run.py experiment={name}"
    assert told.question.endswith("?")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_cell_has_settings_that_can_be_used(name: str) -> None:
    planned = planned_of(name)
    assert check_plan(planned) == []
    assert planned.sweep
    for config in planned.configs:
        made = build_method(config.cache)
        made.plan(LAYERS)
        made.check_shape(LAYERS, KV_HEADS, HEAD_DIM, HEAD_DIM)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_cells_are_named_uniquely_and_each_is_remade_by_its_words(
    name: str, tmp_path: Path
) -> None:
    found = cells([f"experiment={name}", *HERE], tmp_path)
    assert all(cell.problem is None for cell in found)
    names = [cell.name for cell in found]
    assert len(set(names)) == len(names)
    keys = [cell.key for cell in found]
    assert len(set(keys)) == len(keys)
    methods = {method(config) for config in jobs(name)} | {("fp16", "[]")}
    lengths = {config.eval.prefill_tokens for config in jobs(name)}
    assert len(found) == len(methods) * len(lengths)
    for cell in (found[0], found[-1]):
        [again] = cells(cell.words, tmp_path)[-1:]
        assert (again.key, again.config) == (cell.key, cell.config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_is_listed_where_models_and_data_are_not(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path / "mlruns"))
    monkeypatch.setenv("GEAR_ASSETS", str(tmp_path / "assets"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["run.py", f"experiment={name}", "job.dry_run=true"])
    assert cli.main() == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Question: " + experiment(name).question[:40])
    listed = [line for line in shown.splitlines() if line.startswith(dry_run.STATES)]
    places = {(c.model.name, c.dataset.name, c.eval.prefill_tokens, *method(c)) for c in jobs(name)}
    assert len(listed) == len(places | {(*place[:3], "fp16", "[]") for place in places})
    assert {line.partition(" [")[0] for line in listed} == {"cannot run here"}
    assert f"{len(listed)} jobs: {len(listed)} cannot run here." in shown
    assert list(tmp_path.iterdir()) == []


def test_the_papers_main_table_has_its_rows_and_columns() -> None:
    configs = jobs("paper_cot")
    columns = {(c.model.name, c.dataset.name) for c in configs}
    models = ("llama3_8b", "llama2_13b", "mistral_7b")
    assert columns == set(product(models, ("gsm8k_cot", "aqua_cot", "bbh_cot")))
    methods = ["fp16", "per_token", "kcvt", "kivi", "gear_l", "gear"]
    for column in columns:
        rows = [c for c in configs if (c.model.name, c.dataset.name) == column]
        assert list(dict.fromkeys(c.cache["name"] for c in rows)) == methods
        for name in methods[1:]:
            assert [c.gear.bits for c in rows if c.cache["name"] == name] == [4, 2]
    assert {c.eval.task for c in configs} == {"downstream"}
    assert {c.dataset.limit for c in configs} == {None}


def test_the_papers_main_table_runs_the_papers_numbers() -> None:
    for config in jobs("paper_cot"):
        name = config.cache["name"]
        if name == "fp16":
            continue
        [layer] = build_method(config.cache).plan(1)
        for side in (layer["k"], layer["v"]):
            assert side["bits"] == config.gear.bits
            assert side["rank"] == (4 if name in ("gear", "gear_l") else 0)
            assert side["sparse_frac"] == (0.02 if name == "gear" else 0)
            if name in ("per_token", "kivi"):
                assert side["group_size"] == 64


def test_longbench_has_the_papers_rows() -> None:
    configs = jobs("paper_longbench")
    assert {(c.model.name, c.dataset.name) for c in configs} == {("llama2_7b", "longbench")}
    rows = {(c.cache["name"], c.gear.group_size) for c in configs if c.cache["name"] != "fp16"}
    assert rows == set(product(("kivi", "gear_l", "gear"), (64, 32)))
    assert any(c.cache["name"] == "fp16" for c in configs)
    assert {c.gear.bits for c in configs} == {2}


def test_the_ablation_changes_one_thing_at_a_time() -> None:
    first, *others = jobs("paper_ablation")
    [preset] = plan(["gear=gear_2bit"]).configs
    assert first.gear == preset.gear
    changed = []
    for config in others:
        names = {n for n, v in vars(config.gear).items() if v != getattr(first.gear, n)}
        changed.append("rank" if "rank" in names else names.pop())
        assert names <= {"rank", "rank_decode"}
    assert set(changed) == {"rank", "sparse_frac", "outlier_stage", "base"}


def test_the_frontier_is_all_bits_of_k_and_v_with_and_without_error_terms() -> None:
    configs = jobs("bits_frontier")
    grid = set(product((2, 3, 4), (2, 3, 4)))
    for name in ("kivi", "gear_l", "gear"):
        settings = [c.gear for c in configs if c.cache["name"] == name]
        assert {(g.k.bits, g.v.bits) for g in settings if g.k.bits} == grid
        assert [g.bits for g in settings if g.factor_bits == 4] == [2, 3]


def test_a_command_narrows_an_experiment() -> None:
    words = ["experiment=paper_cot", "model=tiny", "dataset=passkey", "cache=kivi"]
    configs = plan(words).configs
    assert [(c.model.name, c.dataset.name, c.gear.bits) for c in configs] == [
        ("tiny", "passkey", 4),
        ("tiny", "passkey", 2),
    ]


def test_the_readmes_experiment_composes_from_a_folder_of_ones_own(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## A new experiment")[2].partition("\n## ")[0]
    own = tmp_path / "experiment" / "my_rank.yaml"
    own.parent.mkdir()
    own.write_text(section.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    words = [f'hydra.searchpath=["file://{tmp_path}"]', "experiment=my_rank"]
    planned = plan(words)
    assert check_plan(planned) == []
    assert [(c.gear.rank, c.dataset.limit) for c in planned.configs] == [(2, 2), (4, 2), (8, 2)]
    told = named_in(words)
    assert told is not None
    assert all(getattr(told, part) for part in PARTS)
    assert told.command in section.replace("python run.py", "", 1)
    missing = [name for name in EXPERIMENTS if f"`{name}`" not in section]
    assert missing == []


def test_a_header_is_read_part_by_part() -> None:
    text = """# @package _global_
# A remark.
# Question: is it so: yes or no?
# Command:  python run.py experiment=own
#           -m
# Expected: 1.5 (note: in nats)
# Decision:  keep it
model: x
# Takes: not in the header
"""
    assert header(text) == {
        "question": "is it so: yes or no?",
        "command": "python run.py experiment=own -m",
        "takes": "",
        "expected": "1.5 (note: in nats)",
        "decision": "keep it",
    }


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"experiment=smok: .* Did you mean smoke\? Available: "):
        experiment("smok")


def test_words_name_an_experiment(tmp_path: Path) -> None:
    smoke = experiment("smoke")
    assert named_in(["model=tiny", "experiment=smoke"]) == smoke
    for words in ([], ["model=tiny"], ["experiment=null"], ["experiment=gone"]):
        assert named_in(words) is None
    own = tmp_path / "experiment" / "own.yaml"
    own.parent.mkdir()
    own.write_text("# @package _global_\n# Question: mine?\n", encoding="utf-8")
    for words in (
        ["--config-dir", str(tmp_path)],
        [f"--config-dir={tmp_path}"],
        [f'hydra.searchpath=["file://{tmp_path}"]'],
    ):
        found = named_in(["experiment=own", *words])
        assert found is not None
        assert (found.name, found.question, found.takes) == ("own", "mine?", "")
    assert named_in(["experiment=own"]) is None
