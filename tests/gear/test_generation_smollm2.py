"""Generating on the bundled model through GEAR: mlx-lm's ways equal the same cache by hand.

Equal means: the same tokens, or the first different one is a tie (the two best logits of the plain
loop lie closer than GAP there), which is printed. Batches and chunks round matmuls differently.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import gear
from evals.data import load_documents
from evals.schema import DatasetConfig
from gear.batch import BatchGearCache
from gear.cache import GearCache
from tests.gear.letters import Letters

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("bundled")]

GAP = 0.05
NEW = 40  # tokens generated: behind each of these prompts a decode block forms
LENGTHS = [160, 95, 120]
LETTERS: Any = Letters()
CHILD = """
import sys
from pathlib import Path
from dataclasses import asdict
from evals.blas import load_optimised_blas
load_optimised_blas()
import mlx.core as mx
import numpy as np
import gear
from evals import models
from evals.schema import ModelConfig
folder = Path(sys.argv[1])
info = models.describe(ModelConfig(name="smollm2", source="smollm2"), folder)
model, _ = models.load(asdict(info), "float32")
caches = gear.load_prompt_cache(folder / "cache.safetensors")
logits = [model(mx.array([[t]]), cache=caches) for t in map(int, sys.argv[2:])]
np.save(folder / "logits.npy", np.array(mx.concatenate(logits)))
"""


class Draft:
    """A draft model that knows the text, and says something else at every third place."""

    layers = (0,)

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        blank = mx.zeros((1, 1, tokens.shape[1], 1))
        cache[0].update_and_fetch(blank, blank)
        place = min(cache[0].offset, len(self.text) - 1)
        said = self.text[place] + (place % 3 == 0)
        return mx.eye(1, 49152, said)[None]


@dataclass
class Plain:
    """What the plain loop chose, and by how much."""

    tokens: list[int]
    gaps: list[float]
    caches: list[Any]


def _plain(model: Any, caches: list[Any], calls: list[list[int]], new: int = NEW) -> Plain:
    """Feed ``calls``, then choose ``new`` tokens greedily, one call a token."""
    out = Plain([], [], caches)
    for call in calls[:-1]:
        mx.eval(model(mx.array([call]), cache=caches))
    call = calls[-1]
    for _ in range(new):
        logits = model(mx.array([call]), cache=caches)[0, -1]
        below, best = mx.topk(logits, 2).tolist()
        out.gaps.append(abs(best - below))
        out.tokens.append(int(mx.argmax(logits).item()))
        call = out.tokens[-1:]
    return out


def _calls(prompt: list[int], step: int = 2048) -> list[list[int]]:
    """Return the calls in which mlx-lm feeds a prompt: chunks, then its last token."""
    return [prompt[i : min(i + step, len(prompt) - 1)] for i in range(0, len(prompt) - 1, step)] + [
        prompt[-1:]
    ]


def _check(name: str, tokens: list[int], plain: Plain) -> None:
    """Require the tokens of the plain loop, or a tie at the first difference."""
    assert len(tokens) == len(plain.tokens)
    for i, (seen, expected) in enumerate(zip(tokens, plain.tokens, strict=True)):
        if seen != expected:
            print(f"{name}: token {i} differs, top-2 gap {plain.gaps[i]:.4f}")
            assert plain.gaps[i] < GAP
            return
    print(f"{name}: {len(tokens)} equal tokens, smallest top-2 gap {min(plain.gaps):.4f}")


def _check_compressed(caches: list[Any]) -> None:
    """Require what the harness's guards require: GEAR's class and compressed tokens everywhere."""
    assert [type(c) for c in caches] == [GearCache] * 30
    assert min(c.tokens_compressed for c in caches) > 0
    size = sum(c.cache_bytes().stored for c in caches)
    assert size < 0.75 * sum(c.cache_bytes().fp16 for c in caches)


@contextmanager
def _recorded(model: Any) -> Iterator[list[list[Any]]]:
    """Compress the model's generations; yield the list that their caches are put in."""
    made: list[list[Any]] = []
    with gear.compressed(model, gear.GearConfig()):
        fresh = model.make_cache

        def make_cache() -> list[Any]:
            made.append(fresh())
            return list(made[-1])  # mlx-lm may swap entries of the list that it gets

        with patch.object(model, "make_cache", make_cache):
            yield made


@pytest.fixture(scope="module")
def model(smollm2: Any) -> Any:
    return smollm2[0]


@pytest.fixture(scope="module")
def prompts(smollm2: Any) -> list[list[int]]:
    config = DatasetConfig(name="embedded", source="embedded", limit=len(LENGTHS))
    documents = load_documents(config, seed=0)
    return [smollm2[1].encode(d.text)[:n] for d, n in zip(documents, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def plain(model: Any, prompts: list[list[int]]) -> list[Plain]:
    with _recorded(model):
        return [_plain(model, model.make_cache(), _calls(p)) for p in prompts]


def test_generate(model: Any, prompts: list[list[int]], plain: list[Plain]) -> None:
    with _recorded(model) as made:
        text = mlx_lm.generate(model, LETTERS, prompt=prompts[0], max_tokens=NEW)
    _check("generate", LETTERS.encode(text), plain[0])
    (caches,) = made
    _check_compressed(caches)
    assert [s.prefill for s in caches[0].segments] == [True, False]


@pytest.mark.parametrize("step", [64, 37])
def test_prompts_in_steps(model: Any, prompts: list[list[int]], step: int) -> None:
    with _recorded(model) as made:
        text = mlx_lm.generate(
            model, LETTERS, prompt=prompts[1], max_tokens=6, prefill_step_size=step
        )
        by_hand = _plain(model, model.make_cache(), _calls(prompts[1], step), 6)
    _check(f"prefill_step_size={step}", LETTERS.encode(text), by_hand)
    for caches in made:
        _check_compressed(caches)
        assert not caches[0].segments[0].prefill  # no call of more than n_b


def test_two_turns_of_one_cache(model: Any, prompts: list[list[int]], plain: list[Plain]) -> None:
    question = prompts[0][:60]
    with gear.compressed(model, gear.GearConfig()):
        caches = make_prompt_cache(model)
    stream = mlx_lm.stream_generate(model, LETTERS, prompts[1], max_tokens=NEW, prompt_cache=caches)
    _check("stream_generate", [response.token for response in stream], plain[1])
    by_hand = copy.deepcopy(plain[1].caches)
    for kept in (caches, by_hand):  # back into the prompt's block: 50 of its 64 tokens stay
        assert trim_prompt_cache(kept, kept[0].offset - 50) > NEW
    text = mlx_lm.generate(model, LETTERS, prompt=question, max_tokens=10, prompt_cache=caches)
    _check("second turn", LETTERS.encode(text), _plain(model, by_hand, _calls(question), 10))
    _check_compressed(caches)
    assert caches[0].tokens_compressed == 50 + 64
    assert caches[0].offset == 50 + 60 + 10


def test_a_batch(model: Any, prompts: list[list[int]], plain: list[Plain]) -> None:
    merged: list[Any] = []
    merge = GearCache.merge

    def recorded(caches: list[GearCache]) -> Any:
        merged.append(merge(caches))
        return merged[-1]

    with _recorded(model) as made, patch.object(GearCache, "merge", staticmethod(recorded)):
        response = mlx_lm.batch_generate(
            model, TokenizerWrapper(LETTERS), prompts, max_tokens=NEW, return_token_ids=True,
            return_prompt_caches=True,
        )  # fmt: skip
    assert len(made) == len(prompts)
    assert {type(c) for c in merged} == {BatchGearCache}
    rows: Any = zip(response.token_ids or [], response.caches or [], plain, strict=True)
    for i, (tokens, caches, alone) in enumerate(rows):
        _check(f"batch_generate row {i}", tokens, alone)
        _check_compressed(caches)
        assert [c.offset for c in caches] == [LENGTHS[i] + NEW] * 30
        for c, expected in zip(caches, alone.caches, strict=True):
            assert c.tokens_compressed == expected.tokens_compressed


@pytest.mark.parametrize(("drafts", "own"), [(5, False), (2, True)])
def test_speculative(
    model: Any, prompts: list[list[int]], plain: list[Plain], drafts: int, own: bool
) -> None:
    draft: Any = model if own else Draft(prompts[2] + plain[2].tokens)
    with _recorded(model) as made:
        responses = mlx_lm.stream_generate(
            model, LETTERS, prompts[2], NEW, draft, num_draft_tokens=drafts
        )
        tokens, drafted = zip(*((r.token, r.from_draft) for r in responses), strict=True)
    _check(f"{drafts} drafts, {'own' if own else 'some wrong'}", list(tokens), plain[2])
    assert NEW // 4 < sum(drafted) < NEW - 5
    assert len(made) == 1 + own
    for caches in made:
        _check_compressed(caches)
        assert LENGTHS[2] + NEW - 2 <= caches[0].offset <= LENGTHS[2] + NEW  # rejects are gone


@pytest.mark.parametrize("start", [0, 5000])
def test_kv_bits_is_refused(model: Any, prompts: list[list[int]], start: int) -> None:
    with (
        gear.compressed(model, gear.GearConfig()),
        pytest.raises(ValueError, match="kv_bits: a GEAR cache is already"),
    ):
        mlx_lm.generate(
            model, LETTERS, prompt=prompts[0], max_tokens=8, kv_bits=8, quantized_kv_start=start
        )


def test_a_saved_cache_goes_on_in_another_process(
    model: Any, plain: list[Plain], tmp_path: Path
) -> None:
    caches, tokens = copy.deepcopy(plain[0].caches), plain[0].tokens[-5:]
    _check_compressed(caches)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    here = [model(mx.array([[t]]), cache=caches) for t in tokens]
    subprocess.run(  # noqa: S603
        [sys.executable, "-c", CHILD, str(tmp_path), *map(str, tokens)],
        check=True, cwd=Path(gear.__file__).parents[1], timeout=300,
    )  # fmt: skip
    there = np.load(tmp_path / "logits.npy")
    assert there.shape == (5, 1, 49152)
    np.testing.assert_array_equal(there, np.array(mx.concatenate(here)))
