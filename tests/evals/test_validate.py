"""Ranges, named values, and sweeps that would measure nothing."""

import math
import re
from copy import deepcopy
from functools import reduce

import pytest

from evals.compose import plan
from evals.names import ConfigError, setting_names
from evals.schema import Config
from evals.validate import CHOICES, LOWEST, check_config, check_plan
from gear.config import LayerConfig, SideConfig


@pytest.fixture(scope="module")
def default() -> Config:
    """Return the config of a run without any word; composed once, copied by each test."""
    return plan([]).configs[0]


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("eval.scored_tokens", 0, "eval.scored_tokens=0: must be at least 1"),
        ("eval.prefill_tokens", -1, "must be at least 0"),
        ("dataset.limit", 0, "must be at least 1"),
        ("eval.protocol", "decoding", "must be one of decode, prefix, oneshot"),
        ("model.dtype", "fp16", "must be one of auto, float32"),
        ("device", "tpu", "must be one of auto, cpu"),
        ("eval.confidence", 1.0, "must be between 0 and 1"),
        ("job.time_limit_s", 0.0, "must be above 0"),
        ("job.memory_limit_gib", math.nan, "must be above 0"),
        ("tracking.experiment_name", "../../x", "tracking.experiment_name='../../x': must begin"),
        ("model.name", "<b>x</b>", "model.name='<b>x</b>': must begin with a letter or digit"),
        ("dataset.name", "=cmd()", "dataset.name='=cmd()': must begin"),
        ("gear.rank", -3, "gear.rank=-3: must be an integer of at least 0"),
        ("gear.bits", 9, "gear.bits=9: must be an integer in [1, 8]"),
        ("gear.sparse_frac", 2.0, "2% is written 0.02"),
        ("gear.sparse_frac", math.nan, "must be a number in [0, 1]"),
        ("gear.v.bits", 0, "gear.v.bits=0"),
        ("gear.group_size", 48, "must be a multiple of 48"),
        ("gear.by_layer", {-1: LayerConfig()}, "gear.by_layer=-1"),
        ("gear.by_layer", {3: LayerConfig(k=SideConfig(bits=40))}, "gear.by_layer.3.k.bits=40"),
    ],
)
def test_a_value_out_of_range_names_field_value_and_what_is_allowed(
    name: str, value: object, answer: str, default: Config
) -> None:
    config = deepcopy(default)
    config.cache["settings"] = config.gear
    *parents, field = name.split(".")
    setattr(reduce(getattr, parents, config), field, value)
    with pytest.raises(ValueError, match=re.escape(answer)):
        check_config(config)


def test_the_default_passes_and_null_means_no_limit(default: Config) -> None:
    assert default.job.time_limit_s is None
    check_config(default)


def test_the_tables_name_settings_that_exist() -> None:
    assert {*CHOICES, *LOWEST} <= set(setting_names())


def test_every_job_of_a_sweep_is_checked() -> None:
    with pytest.raises(ValueError, match=r"gear\.bits=9"):
        check_plan(plan(["gear.bits=2,4,9"], multirun=True))


@pytest.mark.parametrize("tokens", [0, 64])
def test_a_rank_sweep_in_which_no_prefill_block_forms_is_an_error(tokens: int) -> None:
    words = ["gear.rank=4,8", f"eval.prefill_tokens={tokens}"]
    with pytest.raises(ConfigError, match=rf"eval.prefill_tokens={tokens}.*gear.rank"):
        check_plan(plan(words, multirun=True))
    assert check_plan(plan(["gear.rank_decode=1,2", words[1]], multirun=True)) == []


def test_gear_numbers_that_no_job_uses_are_a_warning() -> None:
    [warning] = check_plan(plan(["cache=fp16,mlx_quant", "gear.rank=8"], multirun=True))
    assert "gear.rank=8: not used by cache=fp16, mlx_quant" in warning
    assert len(check_plan(plan(["cache=fp16", "gear=gear_4bit"]))) == 1
    assert check_plan(plan(["cache=fp16,kivi", "gear.group_size=32"], multirun=True)) == []


def test_attend_compressed_needs_a_prefill_that_passes_through_the_cache() -> None:
    with pytest.raises(ConfigError, match=r"eval\.prefill=streaming"):
        check_plan(plan(["gear=port_2bit"]))
    assert check_plan(plan(["gear=port_2bit", "eval.prefill=streaming"])) == []
    assert check_plan(plan(["gear=port_2bit", "eval=oneshot"])) == []
