"""Attention reaches the packed caches through mlx-lm's model files, and only inside the block."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_map
from mlx_lm.models import base, llama, qwen3
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import gear
import gear.cache
from gear import GearConfig
from gear.cache import GearCache
from gear.generation import fresh_caches
from gear.methods.gear import Gear
from gear.routing import native_caches
from gear.together import Together
from tests.gear.letters import PROMPT, Letters, make_model
from tests.gear.tiny_models import DENSE, PACKED, build

CONFIG = GearConfig(bits=8, group_size=32)
CALLS = [140, 60, 3, 1, 1]  # a prefill block of 128 tokens, then a decode block of 64
TOKENS = mx.array([PROMPT + PROMPT])
TOLERANCE = 1e-4  # of the logits' norm
NEW = 48  # tokens generated: behind PROMPT a decode block forms
LETTERS: Any = Letters()


def _logits(model: Any, caches: list[Any], calls: slice = slice(None)) -> mx.array:
    """Return the logits [tokens, vocabulary] of ``calls`` of CALLS, fed one after the other."""
    out, start = [], sum(CALLS[: calls.start or 0])
    for n in CALLS[calls]:
        out.append(model(TOKENS[:, start : start + n], cache=caches)[0])
        mx.eval(out[-1])
        start += n
    return mx.concatenate(out)


def _distance(logits: mx.array, reference: mx.array) -> float:
    """Return the distance relative to the reference's norm, of what saw a compressed past."""
    one, other = logits[CALLS[0] :], reference[CALLS[0] :]
    distance: Any = (mx.linalg.norm(one - other) / mx.linalg.norm(other)).item()
    return distance


def _reference(model: Any) -> mx.array:
    """Return the logits of caches that reconstruct K and V for plain attention."""
    return _logits(model, fresh_caches(model, Gear(CONFIG)))


@contextmanager
def _counted() -> Iterator[Counter[int]]:
    """Count attention to packed caches by layer; on a route, none may reconstruct its past."""
    counts: Counter[int] = Counter()
    attend, reconstruct, step = gear.cache.attend, GearCache.reconstruct, Together.attend

    def counted(queries: mx.array, cache: GearCache, *rest: Any, **options: Any) -> mx.array:
        counts[cache.layer] += 1
        return attend(queries, cache, *rest, **options)

    def counted_step(rows: Together, queries: mx.array, *rest: Any) -> mx.array:
        counts[rows.layer] += queries.shape[0]
        return step(rows, queries, *rest)

    def refused(cache: GearCache) -> Any:
        assert cache.route is None or not cache.segments
        return reconstruct(cache)

    with (
        patch.object(gear.cache, "attend", counted),
        patch.object(Together, "attend", counted_step),
        patch.object(GearCache, "reconstruct", refused),
    ):
        yield counts


@pytest.mark.parametrize("family", PACKED)
def test_a_family_attends_to_packed_caches(family: str) -> None:
    model = build(family)
    exact, reference = _logits(model, native_caches(model)), _reference(model)
    kinds = [type(c) for c in fresh_caches(model, Gear(CONFIG))]
    with gear.compressed(model, CONFIG, tile=64), _counted() as counts:
        caches = make_prompt_cache(model)
        logits = _logits(model, caches)
    assert [type(c) for c in caches] == kinds
    plain = [i for i, kind in enumerate(kinds) if kind is GearCache]
    assert counts == dict.fromkeys(plain, len(CALLS))
    for i in plain:
        assert caches[i].route.layers == set(plain)
        assert [(s.prefill, s.valid) for s in caches[i].segments] == [(True, 128), (False, 64)]
    error, loss = _distance(logits, reference), _distance(reference, exact)
    print(f"{family}: packed {error:.1e}, compressed {loss:.1e}")
    assert error < TOLERANCE
    assert loss > 3 * TOLERANCE  # so the compressed past was seen


@pytest.mark.parametrize("family", DENSE)
def test_a_family_that_attends_by_itself_keeps_the_dense_way(family: str) -> None:
    model = build(family)
    exact, reference = _logits(model, native_caches(model)), _reference(model)
    with ExitStack() as stack:
        with pytest.warns(RuntimeWarning, match=rf"\.{family}: 2 of 2 layers .* reconstructs"):
            stack.enter_context(gear.compressed(model, CONFIG))
        stack.enter_context(patch.object(gear.cache, "attend", side_effect=AssertionError))
        caches = make_prompt_cache(model)
        logits = _logits(model, caches)
    assert [type(c) for c in caches] == [GearCache] * 2
    assert [c.route for c in caches] == [None] * 2
    assert mx.array_equal(logits, reference)
    assert _distance(logits, exact) > 3 * TOLERANCE


class Stored(nn.Module):
    """A layer's attention that puts K and V into the cache and looks at neither."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        kept = x.reshape(*x.shape[:2], 2, -1).swapaxes(1, 2)
        cache.update_and_fetch(kept, kept)
        return x


def test_only_layers_that_hand_k_and_v_over_are_on_the_route() -> None:
    model = build("llama")
    model.layers[1].self_attn = Stored()
    reference = _reference(model)
    with ExitStack() as stack:
        with pytest.warns(RuntimeWarning, match="llama: 1 of 2 layers"):
            stack.enter_context(gear.compressed(model, CONFIG))
        counts = stack.enter_context(_counted())
        caches = make_prompt_cache(model)
        logits = _logits(model, caches)
    assert caches[0].route.layers == {0}
    assert caches[1].route is None
    assert counts == {0: len(CALLS)}
    assert _distance(logits, reference) < TOLERANCE


def _names() -> list[Any]:
    """Return what two families and mlx-lm's base call attention."""
    return [module.scaled_dot_product_attention for module in (llama, qwen3, base)]


def test_only_the_models_own_module_is_touched() -> None:
    before = _names()
    with gear.compressed(build("llama"), CONFIG):
        inside = _names()
    assert inside[0] is not before[0]
    assert inside[1:] == before[1:]
    assert _names() == before


def test_an_error_restores_the_name() -> None:
    before = _names()
    with pytest.raises(KeyError), gear.compressed(build("llama"), CONFIG):
        raise KeyError
    assert _names() == before


def test_a_warning_made_an_error_restores_the_name() -> None:
    model = build("deepseek_v3")
    module = sys.modules[type(model).__module__]
    with pytest.raises(RuntimeWarning), gear.compressed(model, CONFIG):
        pass
    assert module.__dict__["scaled_dot_product_attention"] is base.scaled_dot_product_attention
    assert "make_cache" not in vars(model)


@pytest.mark.parametrize("families", [("llama", "llama"), ("llama", "qwen3")])
def test_nested_blocks(families: tuple[str, str]) -> None:
    before = _names()
    outer, inner = (build(family, seed) for seed, family in enumerate(families))
    references = [_reference(outer), _reference(inner)]
    assert not mx.array_equal(references[0], references[1])
    with gear.compressed(outer, CONFIG):
        between = _names()
        with gear.compressed(inner, CONFIG), _counted() as counts:
            for model, reference in zip((outer, inner), references, strict=True):
                logits = _logits(model, make_prompt_cache(model))
                assert _distance(logits, reference) < TOLERANCE
        assert counts == {0: 2 * len(CALLS), 1: 2 * len(CALLS)}
        assert _names() == between
        with _counted() as counts:
            logits = _logits(outer, make_prompt_cache(outer))
        assert counts == {0: len(CALLS), 1: len(CALLS)}
        assert _distance(logits, references[0]) < TOLERANCE
    assert _names() == before


def test_a_cache_goes_on_densely_after_its_block() -> None:
    model = build("llama")
    reference = _reference(model)
    with gear.compressed(model, CONFIG), _counted() as counts:
        caches = make_prompt_cache(model)
        first = _logits(model, caches, slice(0, 3))
    assert counts == {0: 3, 1: 3}
    with gear.compressed(model, CONFIG), patch.object(gear.cache, "attend", side_effect=KeyError):
        other = copy.deepcopy(caches)  # another block's route is not this cache's
        assert mx.all(mx.isfinite(_logits(model, other, slice(3, 4)))).item()
    with patch.object(gear.cache, "attend", side_effect=KeyError):
        rest = _logits(model, caches, slice(3, None))
    assert _distance(mx.concatenate([first, rest]), reference) < TOLERANCE


def _tokens(model: Any, caches: list[Any] | None = None, **options: Any) -> list[int]:
    """Return the NEW tokens that mlx-lm generates behind PROMPT."""
    prompt = options.pop("prompt", PROMPT)
    stream = mlx_lm.stream_generate(model, LETTERS, prompt, NEW, prompt_cache=caches, **options)
    return [response.token for response in stream]


def test_generate() -> None:
    model = make_model()
    outside = _tokens(model, fresh_caches(model, Gear(CONFIG)))
    with gear.compressed(model, CONFIG), _counted() as counts:
        inside = _tokens(model)
    assert len(outside) == NEW
    assert inside == outside
    assert counts[0] == counts[1] > NEW


@pytest.mark.parametrize("step", [2048, 64])
def test_a_batch_of_rows_of_different_length(step: int) -> None:
    model, prompts = make_model(), [PROMPT, PROMPT[40:135], PROMPT[:30]]

    def batch(caches: Any = None) -> Any:
        return mlx_lm.batch_generate(
            model, TokenizerWrapper(LETTERS), prompts, caches, max_tokens=NEW,
            return_token_ids=True, prefill_step_size=step,
        ).token_ids  # fmt: skip

    outside = batch([fresh_caches(model, Gear(CONFIG)) for _ in prompts])
    with gear.compressed(model, CONFIG), _counted() as counts:
        inside = batch()
    assert [len(row) for row in outside] == [NEW] * len(prompts)
    assert inside == outside
    assert counts[0] == counts[1] > len(prompts) * (NEW - 1)


@pytest.mark.parametrize("both", [False, True])
def test_speculative(both: bool) -> None:
    """Draft with the model's own weights and some noise, so that some drafts are rejected."""
    model, draft = make_model(), make_model()
    mx.random.seed(0)
    noisy = tree_map(lambda w: w + 0.1 * mx.std(w) * mx.random.normal(w.shape), draft.parameters())
    draft.update(noisy)

    def run(caches: list[Any] | None = None) -> tuple[list[int], int]:
        stream = mlx_lm.stream_generate(
            model, LETTERS, PROMPT, NEW, draft, num_draft_tokens=3, prompt_cache=caches
        )
        tokens, drafted = zip(*((r.token, r.from_draft) for r in stream), strict=True)
        return list(tokens), sum(drafted)

    drafts = fresh_caches(draft, Gear(CONFIG)) if both else make_prompt_cache(draft)
    outside = run(fresh_caches(model, Gear(CONFIG)) + drafts)
    with gear.compressed(model, CONFIG), _counted() as counts:
        if both:
            with gear.compressed(draft, CONFIG):
                inside = run()
        else:
            inside = run()
    print(f"{outside[1]} of {NEW} tokens from drafts")
    assert NEW // 10 < outside[1] < NEW * 7 // 10
    assert inside == outside
    assert counts[0] == counts[1] > (NEW if both else NEW // 4)


def test_copied_and_saved_caches_go_on(tmp_path: Path) -> None:
    model, file = make_model(), tmp_path / "cache.safetensors"
    caches = fresh_caches(model, Gear(CONFIG))
    mx.eval(model(mx.array([PROMPT]), cache=caches))
    outside = _tokens(model, caches, prompt=PROMPT[:70])
    with gear.compressed(model, CONFIG):
        caches = make_prompt_cache(model)
        mx.eval(model(mx.array([PROMPT]), cache=caches))
        save_prompt_cache(str(file), caches)
        copied, loaded = copy.deepcopy(caches), gear.load_prompt_cache(file)
        for one in (caches, copied):
            with _counted() as counts:
                assert _tokens(model, one, prompt=PROMPT[:70]) == outside
            assert counts[0] == counts[1] > NEW
        assert [c.route for c in loaded] == [None, None]  # a file belongs to no model
        assert _tokens(model, loaded, prompt=PROMPT[:70]) == outside
    with patch.object(gear.cache, "attend", side_effect=KeyError):
        assert len(_tokens(model, copied, prompt=PROMPT[:5])) == NEW
