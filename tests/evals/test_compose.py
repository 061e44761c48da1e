"""From words to typed jobs: what a sweep expands to, and what a wrong word is answered with."""

import re
from pathlib import Path

import pytest

from evals.compose import make_method, plan
from evals.names import ConfigError, conf_dir, options
from gear.bases import BASES
from gear.config import GearConfig, LayerConfig, SideConfig


def test_one_job_is_typed_and_the_method_takes_gears_numbers() -> None:
    planned = plan(["gear.rank=8", "eval.scored_tokens=64"])
    [config] = planned.configs
    assert not planned.sweep
    assert config.cache["settings"] == config.gear == GearConfig(rank=8)
    assert config.eval.scored_tokens == 64
    assert make_method(config).plan(3)[2]["k"]["rank"] == 8


def test_a_sweep_is_every_combination_in_order() -> None:
    planned = plan(["gear.rank=4,8", "cache=kivi,gear"], multirun=True)
    assert [(c.gear.rank, c.cache["name"]) for c in planned.configs] == [
        (4, "kivi"), (4, "gear"), (8, "kivi"), (8, "gear"),
    ]  # fmt: skip


def test_a_glob_takes_every_option() -> None:
    names = [c.cache["name"] for c in plan(["cache=glob(*,exclude=g*)"], multirun=True).configs]
    assert names == [name for name in options([conf_dir()])["cache"] if not name.startswith("g")]


def test_layer_overrides_arrive_with_integer_layers() -> None:
    [config] = plan(["+gear.by_layer={10: {k: {bits: 4}}}"]).configs
    assert config.gear.by_layer == {10: LayerConfig(k=SideConfig(bits=4))}


def test_an_experiment_can_be_a_sweep_and_a_word_overrides_it(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/own.yaml").write_text(
        "# @package _global_\ngear:\n  bits: 3\nhydra:\n  mode: MULTIRUN\n  sweeper:\n"
        "    params:\n      cache: kivi,gear\n      gear.rank: 1,2\n",
        encoding="utf-8",
    )
    words = [f'hydra.searchpath=["file://{tmp_path}"]', "experiment=own"]
    planned = plan(words)
    assert planned.sweep
    assert [(c.cache["name"], c.gear.rank, c.gear.bits) for c in planned.configs] == [
        ("kivi", 1, 3), ("kivi", 2, 3), ("gear", 1, 3), ("gear", 2, 3),
    ]  # fmt: skip
    assert len(plan([*words, "gear.rank=7"]).jobs) == 2


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("gear.rnak=8", "Did you mean gear.rank?"),
        ("+gear.rnak=8", "Did you mean gear.rank?"),
        ("rank=8", "Did you mean gear.rank?"),
        ("kache=kivi", "Did you mean cache?"),
        ("cache=kivvi", "Did you mean kivi? Available: "),
        ("cache=kivi,gaer", "Did you mean gear?"),
        ("experiment=smokee", "Did you mean smoke?"),
        ("tracking=null", "there is no such option"),
        ("+cache=kivi", "without the +: cache=kivi"),
        ("+gear.rank=8", "without the +"),
        ("~tracking", "settings are not removed"),
        ("gear.rank=abc", "gear.rank='abc': must be an integer or null"),
        ("gear.rank=4,abc", "gear.rank='abc': must be an integer or null"),
        ('gear.bits="4"', "gear.bits='4': must be an integer"),
        ("gear.bits=4.0", "gear.bits=4.0: must be an integer"),
        ("gear.bits=true", "gear.bits=True: must be an integer"),
        ('gear.clip="false"', "gear.clip='false': must be true or false"),
        ("gear.clip=0", "gear.clip=0: must be true or false"),
        ("gear.sparse_frac='0.02'", "must be a number"),
        ("model.revision=1e5", "must be text or null"),
        ("gear={bit: 4}", "gear.bit: there is no such setting. Did you mean bits?"),
        ("gear.by_layer={1: {k: {bits: 4}}}", "'+gear.by_layer={10: {k: {bits: 4}}}'"),
        ("gear.by_layer.1.k.bits=4", "'+gear.by_layer={10: {k: {bits: 4}}}'"),
        ("+gear.by_layer={1: {k: {bit: 4}}}", "Did you mean bits?"),
        ("+gear.by_layer={a: {k: {bits: 4}}}", "the key 'a' must be an integer"),
        ("cache.settings.rank=8", "Write gear.rank="),
        ("cache.bit=4", "Did you mean bits?"),
        ("cache.bits=4", "not an option of this cache, but of cache=mlx_quant"),
        ("gear.rank=interval(1,8)", "an interval has no list of values"),
        ("hydra.verbose=true,false", "not swept"),
        ("hydra.launchr=x", "no such setting"),
        ("hydra/launcher=none", "Could not find 'hydra/launcher/none'"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(word: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(answer)):
        plan([word], multirun="," in word)


def test_a_sweep_without_m_says_so() -> None:
    with pytest.raises(ValueError, match="add -m"):
        plan(["gear.rank=4,8"])


@pytest.mark.parametrize("word", ["cache.bits='8'", "cache.bits=x", "cache.bits=2.5"])
def test_method_options_keep_the_type_they_were_written_in(word: str) -> None:
    with pytest.raises(ConfigError, match=r"cache\.bits=.*must be an integer"):
        plan(["cache=mlx_quant", word])


def test_an_option_of_another_method_in_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/own.yaml").write_text(
        "name: own\n_target_: gear.methods.fp16.Fp16\nbits: 4\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"cache\.bits: own has no such option"):
        plan([f'hydra.searchpath=["file://{tmp_path}"]', "cache=own"])


def test_a_bases_own_options_come_with_a_plus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BASES, "trial", "tests.gear.trial_base.Trial")
    words = ["gear.base=trial", "gear.bits=1", "+gear.base_options.factor=2,3"]
    swept = plan([*words, "+gear.v.base_options={parts: [4]}"], multirun=True).configs
    layers = [make_method(config).plan(1)[0] for config in swept]
    plain = {"calibration": "", "parts": [1, 2]}
    assert [layer["k"]["base_options"] for layer in layers] == [
        {**plain, "factor": 2.0}, {**plain, "factor": 3.0},
    ]  # fmt: skip
    assert layers[0]["v"]["base_options"]["parts"] == [4]
    for word in ("gear.base_options.factor=2", "gear.k.base_options={factor: 2}"):
        name = word.partition("base_options")[0]
        with pytest.raises(ConfigError, match=re.escape(f"+{name}base_options.NAME=value")):
            plan([word])
