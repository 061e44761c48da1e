"""What a base says before there is an array: options, blocks, refusals, tensors from a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from gear import GearCache, GearConfig, SettingError, resolve
from gear.bases import BASES
from gear.calibration import tensors
from gear.codec import compress
from gear.config import LayerConfig, LayerSettings, SideConfig
from tests.gear.base_cases import TRIAL, normal, settings


@pytest.fixture(autouse=True)
def _trial_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BASES, "trial", TRIAL)


def test_saying_what_a_base_is_loads_no_mlx() -> None:
    code = (
        "import sys; from gear.bases import BASES, load_base\n"
        "from gear.bytes import block_terms; from gear.config import GearConfig, resolve\n"
        "for name in (n for n in BASES if not hasattr(load_base(n), 'fit')):\n"
        "    s = resolve(GearConfig(base=name), 1)[0]\n"
        "    block_terms('k', s.k, s.outlier_stage, 2, 64, 64, 2)\n"
        "print('mlx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "False"


def test_options_are_filled_in_typed_and_in_the_plan() -> None:
    plain = settings("trial").as_dict()
    assert plain["k"]["base_options"] == {"calibration": "", "factor": 1.0, "parts": [1, 2]}
    given = settings("trial", base_options={"factor": 2, "parts": [3]})
    assert (given.k.option("factor"), given.k.option("parts")) == (2.0, (3,))
    assert hash(given.k) != hash(settings("trial").k)
    saved = json.loads(json.dumps(given.k.as_dict()))
    assert type(given.k).of(saved) == given.k
    assert "base_options" not in settings("grouped").as_dict()["k"]  # so that old keys stay


def test_options_by_side_and_layer_and_another_base_forgets_them() -> None:
    config = GearConfig(
        base="trial", bits=1, n_b=64, base_options={"factor": 2.0},
        k=SideConfig(base_options={"parts": [7]}), v=SideConfig(base="grouped"),
        by_layer={1: LayerConfig(k=SideConfig(base_options={"factor": 3.0}))},
    )  # fmt: skip
    first, second = resolve(config, 2)
    assert dict(first.k.base_options) == {"calibration": "", "factor": 2.0, "parts": (7,)}
    assert second.k.option("factor") == 3.0
    assert first.v.base_options == ()


@pytest.mark.parametrize(
    ("base", "values", "text"),
    [
        ("grouped", {"base_options": {"m": 1}}, "base=grouped has no options"),
        ("trial", {"base_options": {"facto": 1}}, "Did you mean factor"),
        ("trial", {"base_options": {"factor": "2"}}, "gear.base_options.factor='2': must be a num"),
        ("trial", {"base_options": {"parts": 3}}, "gear.base_options.parts=3: must be a list"),
        ("trial", {"clip": True}, "gear.clip=True: must be False with base=trial"),
        ("trial", {"scale_bits": 8}, "gear.scale_bits=8: must be 16 with base=trial"),
        ("trial", {"bits": 2}, "gear.bits=2: must be one of 1"),
        ("trial", {"n_b": 16}, "gear.n_b=16: must be an integer of at least 32"),
        ("trial", {"n_b": 40}, "gear.n_b=40: must be a multiple of 16"),
        ("pre_token", {}, "gear.base='pre_token': must be one of grouped, vector, affine_mlx, per"),
        ("trial", {"base_options": {"calibration": "none.safetensors"}}, "calibration='none"),
    ],
)
def test_what_a_base_cannot_use_is_named(base: str, values: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError) as error:
        settings(base, **values)
    assert text in str(error.value)


def test_a_base_says_its_block_and_the_head_dims_it_takes() -> None:
    assert resolve(GearConfig(base="trial", bits=1), 1)[0].n_b == 48
    with pytest.raises(SettingError, match="another one for head_dim 20"):
        GearCache(settings("trial")).update_and_fetch(
            mx.ones((1, 2, 3, 20)), mx.ones((1, 2, 3, 20))
        )


def test_calibrated_tensors_come_by_content(tmp_path: Path) -> None:
    """The key has the content, layer and side of the file, not its place; a change is another."""

    def layers(folder: str, gain: float) -> list[LayerSettings]:
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "gains.safetensors"
        names = ("0.k", "0.v", "1.k", "1.v")
        held = {f"{n}.gain": mx.array(gain * (i + 1)) for i, n in enumerate(names)}
        mx.save_safetensors(str(file), held)
        return resolve(
            GearConfig(
                base="trial", bits=1, base_options={"calibration": str(file)}, sparse_frac=0
            ),
            2,
        )

    here, there, other = layers("here", 1.0), layers("there", 1.0), layers("other", 0.5)
    assert here == there
    assert here != other
    assert str(tmp_path) not in json.dumps(here[0].as_dict())
    assert here[1].v.option("calibration").endswith("#1.v")
    x, gains = normal(64), []
    for layer, side in ((here[0], "k"), (here[1], "v"), (other[1], "v")):
        own = getattr(layer, side)
        block = compress(x, side, own, layer, 0)
        gains.append(mx.abs(block.base()).max().item())
    s = settings("trial", sparse_frac=0)
    plain = mx.abs(compress(x, "v", s.v, s, 0).base()).max().item()
    assert [g / plain for g in gains] == pytest.approx([1, 4, 2])
    with pytest.raises(ValueError, match=r"holds no tensors 2\.k"):
        tensors(here[0].k.option("calibration").replace("#0.k", "#2.k"))
    with pytest.raises(ValueError, match="not known in this process"):
        tensors("sha256:00#0.k")
