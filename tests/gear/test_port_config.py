"""The port's snippet: what KVCacheConfig refuses and means, and generating with it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import mlx_lm
import pytest

from gear import KVCacheBuilder, KVCacheConfig, KVCacheFactory, PortCache, SettingError
from gear.bytes import bits_per_element
from tests.gear.letters import PROMPT, Letters, generate, make_model

SNIPPET = {
    "method": "gear", "head_dim": 128, "gear_bits": 2, "gear_rank": 8,
    "gear_energy_threshold": 0.90, "gear_sparse_fraction": 0.005, "gear_group_size": 32,
    "gear_quantize_values": True,
}  # fmt: skip


def test_the_snippet_means_the_ports_gear() -> None:
    settings = KVCacheConfig(**SNIPPET).settings()  # type: ignore[arg-type]
    assert settings.k == settings.v
    side = settings.k.as_dict()
    assert side.pop("sparse_frac") == 0.005
    assert side == {
        "bits": 2, "group_size": 32, "base": "grouped", "rank": 8, "rank_decode": 8,
        "factor_bits": 16, "outlier_bits": 16, "scale_bits": 16, "clip": False,
    }  # fmt: skip
    assert (settings.outlier_stage, settings.attend) == ("post_lowrank", "compressed")
    assert (settings.energy, settings.n_b, settings.n_sink, settings.recent) == (
        "nuclear",
        64,
        0,
        0,
    )


def test_the_defaults_are_the_ports_but_for_the_rank() -> None:
    assert asdict(KVCacheConfig()) == {
        **SNIPPET, "gear_rank": 4, "gear_sparse_fraction": 0.01
    }  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_the_defaults_compress(head_dim: int) -> None:
    settings = KVCacheConfig(head_dim=head_dim).settings()
    for side in ("k", "v"):
        assert bits_per_element(side, settings, 1, settings.n_b, head_dim, 4) < 8


def test_a_rank_by_energy_is_bounded_and_counts_the_plain_sum() -> None:
    config = KVCacheConfig(gear_rank=None, gear_energy_threshold=0.5)
    settings = config.settings()
    assert (settings.k.rank, settings.k.rank_decode, settings.max_rank) == (None, 2, 16)
    assert (settings.energy, settings.energy_threshold) == ("nuclear", 0.5)


@pytest.mark.parametrize("group", [20, 32, 48, 64, 100])
def test_any_group_size_fills_the_buffer(group: int) -> None:
    n_b = KVCacheConfig(gear_group_size=group).settings().n_b
    assert n_b % group == 0
    assert 64 <= n_b < 64 + group


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("method", "kivi"), ("head_dim", 0), ("head_dim", "64"), ("gear_bits", "4"),
        ("gear_bits", 0), ("gear_bits", 9), ("gear_bits", 2.5), ("gear_bits", True),
        ("gear_rank", -3), ("gear_rank", "8"), ("gear_rank", 1000),
        ("gear_energy_threshold", 1.5), ("gear_sparse_fraction", 1.5),
        ("gear_sparse_fraction", -1), ("gear_sparse_fraction", float("nan")),
        ("gear_sparse_fraction", 2), ("gear_group_size", 0), ("gear_group_size", 32.0),
        ("gear_quantize_values", "false"), ("gear_quantize_values", 1),
        ("gear_quantize_values", None),
    ],
)  # fmt: skip
def test_a_bad_value_is_an_error_that_names_its_field(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=rf"^{name}={value!r}: must be "):
        KVCacheConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "near"),
    [("gear_rnk", "gear_rank"), ("sparse_fraction", "gear_sparse_fraction"), ("seed", "method")],
)
def test_an_unknown_name_is_an_error_with_the_nearest_one(name: str, near: str) -> None:
    with pytest.raises(SettingError, match=rf"^{name}=8: .*Did you mean {near}\?") as caught:
        KVCacheConfig(**{name: 8})  # type: ignore[arg-type]
    assert "gear_quantize_values" in str(caught.value)


def test_a_setting_that_would_do_nothing_is_an_error() -> None:
    with pytest.raises(SettingError, match=r"gear_energy_threshold=0.8: .*gear_rank=None"):
        KVCacheConfig(gear_energy_threshold=0.8)


def test_the_term_that_outgrows_fp16_is_named() -> None:
    with pytest.raises(SettingError, match=r"^gear_sparse_fraction=0.9: must be such that"):
        KVCacheConfig(gear_sparse_fraction=0.9)
    with pytest.raises(SettingError, match=r"^gear_group_size=2: must be such that"):
        KVCacheConfig(gear_group_size=2)
    with pytest.raises(SettingError, match=r"^gear_rank=30: .*head_dim 16 .*K: 23\.3 bits"):
        KVCacheConfig(head_dim=16, gear_rank=30)


def test_replacing_a_field_checks_again() -> None:
    config = replace(KVCacheConfig(), gear_bits=4)
    assert config.settings().v.bits == 4
    with pytest.raises(SettingError, match="gear_bits"):
        replace(config, gear_bits=0)


def test_caches_are_fresh_and_know_their_layer() -> None:
    model, config = make_model(), KVCacheConfig(**SNIPPET)  # type: ignore[arg-type]
    one, two = (KVCacheBuilder.for_model(model, config) for _ in range(2))
    assert type(one) is list
    assert [(type(c), c.layer) for c in one] == [(PortCache, 0), (PortCache, 1)]
    assert not {id(c) for c in one} & {id(c) for c in two}
    assert type(KVCacheFactory.create(config)) is PortCache


def test_the_snippet_generates_the_same_text_twice() -> None:
    model, config = make_model(), KVCacheConfig(**SNIPPET)  # type: ignore[arg-type]
    made: list[Any] = []

    def make_cache(*_a: Any, **_k: Any) -> list[Any]:
        made.append(KVCacheBuilder.for_model(model, config))
        return made[-1]

    exact = generate(model, 30)
    model.make_cache = make_cache
    texts = [generate(model, 30) for _ in range(2)]
    letters: Any = Letters()
    stream = mlx_lm.stream_generate(model, letters, PROMPT, max_tokens=30)
    texts.append("".join(r.text for r in stream))
    assert len(texts[0]) == 30
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != exact  # the compressed cache was really in use
    assert len(made) == 3
    for caches in made:
        assert all(c.tokens_compressed == 128 for c in caches)
        assert all(0 < c.error_recovery_ratio < 1 for c in caches)


def test_one_list_for_every_generation_starts_where_the_last_one_ended() -> None:
    model, config = make_model(), KVCacheConfig(**SNIPPET)  # type: ignore[arg-type]
    caches = KVCacheBuilder.for_model(model, config)
    model.make_cache = lambda *_a, **_k: caches
    for run in (1, 2):
        generate(model, 10)
        assert caches[0].offset == run * (len(PROMPT) + 10)


@pytest.mark.model
def test_the_snippet_on_smollm2(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = smollm2
    config = KVCacheConfig(**SNIPPET)  # type: ignore[arg-type]
    made: list[Any] = []

    def make_cache(*_a: Any, **_k: Any) -> list[Any]:
        made.append(KVCacheBuilder.for_model(model, config))
        return made[-1]

    monkeypatch.setattr(model, "make_cache", make_cache, raising=False)
    prompt = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 8)
    one, two = (
        mlx_lm.generate(model, tokenizer.wrapped, prompt=prompt, max_tokens=12) for _ in range(2)
    )
    assert len(one) > 10
    assert one == two
    assert [c.tokens_compressed for caches in made for c in caches] == [64] * 2 * len(made[0])
