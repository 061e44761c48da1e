"""Jobs: what is in the key and what is not, the fp16 arm, and what the worker is sent."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from evals import blas
from evals.job import build_job, build_method
from evals.schema import Config
from gear.config import GearConfig, LayerConfig, SettingError, SideConfig
from tests.evals.configs import small

EFFECTIVE: dict[str, Any] = {
    "seed": 1,
    "model.name": "other", "model.dtype": "bfloat16", "model.layers": 3, "model.heads": 2,
    "model.kv_heads": 4, "model.head_dim": 128, "model.vocab_size": 300, "model.seed": 1,
    "dataset.name": "other", "dataset.limit": 3, "dataset.windows_per_document": None,
    "dataset.join_documents": True,
    "eval.name": "other", "eval.protocol": "prefix", "eval.task": "reconstruction",
    "eval.prefill_tokens": 192, "eval.scored_tokens": 65, "eval.chunk": 16,
    "eval.prefill": "streaming", "eval.prefill_chunk": 64, "eval.allow_uncompressed": True,
    "eval.attention": "dense", "eval.tile_tokens": 64,
    "eval.bootstrap_samples": 60, "eval.confidence": 0.9,
    "gear.bits": 4, "gear.base": "vector", "gear.group_size": 32, "gear.n_b": 128, "gear.rank": 8,
    "gear.rank_decode": 4, "gear.max_rank": 8, "gear.energy": "nuclear",
    "gear.energy_threshold": 0.8, "gear.iterations": 3, "gear.seed": 1, "gear.sparse_frac": 0.04,
    "gear.outlier_stage": "post_lowrank", "gear.clip": True, "gear.n_sink": 4, "gear.recent": 32,
    "gear.allow_larger_than_fp16": True,
    "gear.k": SideConfig(bits=4), "gear.v": SideConfig(rank=1),
    "gear.by_layer": {1: LayerConfig(k=SideConfig(bits=4))},
}  # fmt: skip
"""A change of each field that can change a result of the tiny model on the embedded texts."""

IRRELEVANT: dict[str, Any] = {
    "tracking.name": "mlflow", "tracking.enabled": True, "tracking.uri": "sqlite:///x.db",
    "tracking.experiment_name": "other",
    "job.time_limit_s": 5.0, "job.memory_limit_gib": 2.0,
    "job.retries": 3, "job.fail_fast": True,
    "job.prefill_memory_gib": 1.0, "job.prefill_spill": True,
    "job.dry_run": True, "job.share": "s3://bucket/folder",
    "model.path": "/elsewhere", "model.repo": "a/b", "model.revision": "c",
    "device": "cpu",
}  # fmt: skip
"""A change of fields that cannot (the model's are those of other sources; cpu is auto here)."""

ELSEWHERE = {
    "cache", "model.source", "dataset.source", "dataset.task", "dataset.path", "dataset.repo",
    "dataset.config", "dataset.split", "dataset.revision", "dataset.text_field",
    "dataset.num_fewshot", "dataset.fewshot_path", "dataset.metric", "dataset.lengths",
    "dataset.depths", "dataset.per_cell", "dataset.min_context_tokens",
    "eval.batch_size", "eval.max_new_tokens", "eval.chat_template", "eval.system_prompt",
    "eval.add_bos",
    "gear.solver", "gear.factor_bits", "gear.outlier_bits", "gear.scale_bits", "gear.attend",
    "gear.base_options",
}  # fmt: skip
"""Fields of other sources or bases, of downstream tasks (test_downstream.py), or with one value."""


def changed(name: str, value: Any, cache: str = "gear") -> Config:
    """Return the small job with one field changed, named as on the command line."""
    config = small(cache)
    group, _, field = name.rpartition(".")
    node = {"": config, "gear": config.cache.get("settings")}.get(group) or getattr(config, group)
    setattr(node, field, value)
    return config


def test_every_field_of_the_schema_is_classified() -> None:
    names = set()
    for field in fields(Config):
        group = getattr(Config(), field.name)
        inner = fields(group) if is_dataclass(group) else ()
        names |= {f"{field.name}.{f.name}" for f in inner} or {field.name}
    assert names == EFFECTIVE.keys() | IRRELEVANT.keys() | ELSEWHERE


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_job(small(), tmp_path_factory.mktemp("root")).key


@pytest.mark.fault
@pytest.mark.parametrize("name", EFFECTIVE)
def test_an_effective_field_changes_the_key(name: str, key: str, tmp_path: Path) -> None:
    assert build_job(changed(name, EFFECTIVE[name]), tmp_path).key != key


@pytest.mark.fault
@pytest.mark.parametrize("name", IRRELEVANT)
def test_tracking_paths_and_limits_do_not(
    name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "backend", lambda: "cpu")
    assert build_job(changed(name, IRRELEVANT[name]), tmp_path).key == key


def test_the_place_of_a_text_is_not_in_the_key_but_its_content_is(tmp_path: Path) -> None:
    def job_of(folder: str, text: str) -> str:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(text)
        config = small()
        config.dataset.source, config.dataset.path = "file", str(tmp_path / folder / "text.txt")
        return build_job(config, tmp_path).key

    here = job_of("here", "words " * 99)
    assert job_of("there", "words " * 99) == here
    assert job_of("else", "words " * 98 + "Words ") != here


@pytest.mark.parametrize("name", ["gear.rank", "gear.sparse_frac", "gear.rank_decode"])
def test_what_a_method_switches_off_is_not_in_its_key(name: str, tmp_path: Path) -> None:
    config = changed(name, EFFECTIVE[name], "kivi")
    assert build_job(config, tmp_path).key == build_job(small("kivi"), tmp_path).key


def test_the_fp16_arm_is_one_job_for_all_methods(tmp_path: Path) -> None:
    arms = [
        build_job(config, tmp_path).baseline for config in (small(), small(rank=8), small("kivi"))
    ]
    exact = build_job(small("fp16"), tmp_path)
    assert exact.baseline is None
    assert {arm.key for arm in arms if arm is not None} == {exact.key}
    assert exact.config["cache"] == {"name": "fp16", "layers": []}


def test_reconstruction_needs_no_fp16_arm(tmp_path: Path) -> None:
    config = small()
    config.eval.task = "reconstruction"
    assert build_job(config, tmp_path).baseline is None


def test_the_spec_is_plain_and_names_the_arm(tmp_path: Path) -> None:
    config = small(by_layer={1: LayerConfig(v=SideConfig(rank=2))})
    config.job.time_limit_s = 9.0
    job = build_job(config, tmp_path)
    assert job.baseline is not None
    assert json.loads(json.dumps(job.spec)) == job.spec
    assert job.spec["config"] == job.config
    assert job.spec["baseline_key"] == job.baseline.key
    assert job.baseline.spec["baseline_key"] == job.baseline.key
    assert (job.spec["time_limit_s"], job.spec["memory_limit_gib"]) == (9.0, None)


def test_the_worker_builds_the_method_that_the_parent_planned(tmp_path: Path) -> None:
    settings = GearConfig(
        rank=3, k=SideConfig(bits=4), by_layer={1: LayerConfig(v=SideConfig(rank=2))}
    )
    config = small()
    config.cache["settings"] = settings
    job = build_job(config, tmp_path)
    method: Any = build_method(json.loads(json.dumps(job.spec["cache"])))
    assert method.settings == settings
    assert method.plan(2) == job.config["cache"]["layers"]


@pytest.mark.fault
def test_keys_hold_no_machine_path(tmp_path: Path) -> None:
    assert str(tmp_path) not in json.dumps(build_job(small(), tmp_path).config)


def test_a_device_that_is_not_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "backend", lambda: "cpu")
    with pytest.raises(SettingError, match=r"device='cuda': must be one of auto, cpu"):
        build_job(changed("device", "cuda"), tmp_path)


@pytest.mark.fault
def test_backend_and_dtype_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "backend", lambda: "metal")
    on_metal = build_job(small(), tmp_path)
    monkeypatch.setattr(blas, "backend", lambda: "cpu")
    on_cpu = build_job(small(), tmp_path)
    assert (on_metal.config["backend"], on_cpu.config["backend"]) == ("metal", "cpu")
    assert on_metal.key != on_cpu.key


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("gear.bits", 9, "gear.bits"),
        ("gear.by_layer", {7: LayerConfig()}, "gear.by_layer"),
        ("eval.prefill_tokens", 0, "eval.prefill_tokens"),
        ("model.kv_heads", 3, "model.kv_heads"),
        ("dataset.limit", 0, "dataset.limit"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(
    name: str, value: Any, field: str, tmp_path: Path
) -> None:
    config = changed(name, value)
    config.eval.protocol = "prefix"
    with pytest.raises(ValueError, match=field):
        build_job(config, tmp_path)
