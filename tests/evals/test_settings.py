"""Flat settings: the command line's names, layers and sides merged, labels that say what varies."""

from __future__ import annotations

from dataclasses import replace

from evals.settings import flatten, labels
from gear.config import GearConfig, LayerConfig, SideConfig
from tests.evals.fake_records import config


def test_names_are_those_of_the_command_line() -> None:
    flat = flatten(config(settings=GearConfig(rank=8)))
    assert flat["gear.rank"] == "8"
    assert flat["gear.n_b"] == "64"
    assert flat["gear.clip"] == "false"
    assert flat["cache.name"] == "gear"
    assert flat["model.name"] == "tiny"
    assert flat["seed"] == "0"
    assert not any(".k." in name or "layers.0" in name for name in flat)


def test_what_is_not_set_has_no_name() -> None:
    flat = flatten(config())
    assert "eval.chunk" not in flat
    assert "dataset.revision" not in flat


def test_a_rank_by_energy_is_a_value() -> None:
    assert flatten(config(settings=GearConfig(rank=None)))["gear.rank"] == "null"


def test_sides_that_differ_are_named_apart() -> None:
    flat = flatten(config(settings=GearConfig(k=SideConfig(bits=4))))
    assert (flat["gear.k.bits"], flat["gear.v.bits"]) == ("4", "2")
    assert "gear.bits" not in flat
    assert flat["gear.rank"] == "4"


def test_layers_that_differ_say_which_has_what() -> None:
    layer = LayerConfig(k=SideConfig(rank=9), v=SideConfig(rank=9))
    assert flatten(config(settings=GearConfig(by_layer={1: layer})))["gear.rank"] == "0:4 1:9"


def test_other_methods_options_are_the_caches() -> None:
    parts = config("mlx_quant")
    parts["cache"]["layers"] = [{"bits": 4, "group_size": 64}]
    flat = flatten(parts)
    assert (flat["cache.bits"], flat["cache.group_size"]) == ("4", "64")


def test_labels_of_a_rank_sweep() -> None:
    gear = GearConfig()
    configs = [config("fp16"), *(config(settings=replace(gear, rank=r)) for r in (4, 8))]
    assert labels(configs) == ["fp16", "gear (gear.rank=4)", "gear (gear.rank=8)"]


def test_one_job_needs_no_settings() -> None:
    assert labels([config()]) == ["gear"]


def test_what_a_methods_name_says_does_not_count_as_varying() -> None:
    kivi = config("kivi", GearConfig(rank=0, sparse_frac=0.0))
    assert labels([config(), kivi]) == ["gear", "kivi"]


def test_another_model_shows_by_its_name_alone() -> None:
    other = config(model={"name": "smollm2", "source": "smollm2", "weight_hash": "00" * 32})
    assert labels([config(), other]) == ["gear (model=tiny)", "gear (model=smollm2)"]


def test_nameless_settings_show_where_they_vary() -> None:
    assert labels([config(), config(seed=1)]) == ["gear (seed=0)", "gear (seed=1)"]


def test_how_packed_attention_runs_shows_only_among_those_that_have_it() -> None:
    packed, dense = (config(eval={"attention": a}) for a in ("packed", "dense"))
    assert labels([config("fp16"), packed]) == ["fp16", "gear"]
    assert labels([config("fp16"), packed, dense]) == [
        "fp16", "gear (eval.attention=packed)", "gear (eval.attention=dense)",
    ]  # fmt: skip
