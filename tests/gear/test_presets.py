"""The presets of conf/gear: what each sets, and the bits per element that its header states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from gear.bytes import bits_per_element
from gear.config import GearConfig, LayerSettings, resolve
from gear.methods.gear import Gear

FOLDER = Path(__file__).parents[2] / "conf" / "gear"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
HEADS = 8


def _load(name: str) -> GearConfig:
    file = OmegaConf.load(FOLDER / f"{name}.yaml")
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(GearConfig), file))
    return config


def _settings(name: str) -> LayerSettings:
    return resolve(_load(name), 1)[0]


def _header(name: str) -> list[str]:
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("#")]


def figures(name: str) -> list[str]:
    """Return the lines of a preset's header that state its bits per element."""
    s = _settings(name)
    whole = 1024 // s.n_b * s.n_b
    lines = [
        f"# Bits per element (fp16: 16), prefill block of {whole} / decode block of {s.n_b} tokens,"
        f" {HEADS} heads:"
    ]
    for head_dim in (64, 128):
        sides = []
        for side in ("k", "v"):
            own = getattr(s, side)
            blocks = ((whole, own.rank), (s.n_b, own.rank_decode))
            bits = (bits_per_element(side, s, HEADS, n, head_dim, r) for n, r in blocks)
            sides.append(f"{side.upper()} " + " / ".join(f"{b:.2f}" for b in bits))
        lines.append(f"#   head_dim {head_dim:>3}: {', '.join(sides)}")
    return lines


@pytest.mark.parametrize("name", PRESETS)
def test_a_header_states_question_and_computed_bits(name: str) -> None:
    header = _header(name)
    assert any(line.startswith("# Question: ") for line in header)
    assert header[-3:] == figures(name)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_preset_compresses(name: str, head_dim: int) -> None:
    Gear(_load(name)).check_shape(2, 3, head_dim, head_dim)


def test_the_presets_are_those_of_the_documents() -> None:
    assert PRESETS == ["gear_2bit", "gear_4bit", "gear_frontier", "port_2bit"]


def test_port_2bit_is_the_ports_order() -> None:
    s = _settings("port_2bit")
    assert (s.outlier_stage, s.attend, s.energy, s.n_b) == (
        "post_lowrank", "compressed", "nuclear", 64
    )  # fmt: skip
    assert s.k == s.v
    assert (s.k.bits, s.k.group_size, s.k.base) == (2, 32, "grouped")
    assert (s.k.rank, s.k.rank_decode, s.k.sparse_frac) == (4, 4, 0.01)


def test_gear_frontier_spends_its_bytes_on_keys_and_corrects_values() -> None:
    s = _settings("gear_frontier")
    assert (s.k.bits, s.k.rank, s.k.rank_decode, s.k.clip) == (3, 0, 0, False)
    assert (s.v.bits, s.v.rank, s.v.factor_bits, s.v.clip) == (2, 4, 4, True)
    assert (s.k.scale_bits, s.v.scale_bits, s.n_sink) == (8, 8, 4)
    assert (s.k.sparse_frac, s.v.sparse_frac) == (0, 0)
