"""CacheLM on the bundled model: real tokens, real texts, and rows of a batch against batch 1."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from lm_eval.api.instance import Instance

from evals.caches import make_caches
from evals.data import load_documents
from evals.generation import Ending
from evals.lm import CacheLM
from evals.prefill import PrefillStore
from evals.schema import DatasetConfig
from gear.batch import BatchGearCache
from gear.cache import GearCache
from gear.methods.fp16 import Fp16
from gear.methods.gear import Gear
from gear.routing import routed

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("bundled")]

GAP = 0.05
NEW = 12
LENGTHS = [70, 2, 119]


@pytest.fixture(scope="module")
def text() -> str:
    config = DatasetConfig(name="embedded", source="embedded", limit=1)
    return load_documents(config, seed=0)[0].text


@pytest.fixture(scope="module")
def prefills() -> PrefillStore:
    return PrefillStore()


def _lm(smollm2: Any, prefills: PrefillStore, method: Any, **options: Any) -> CacheLM:
    model, tokenizer = smollm2
    route = options.pop("route", None)
    caches = partial(make_caches, model, method, route)
    return CacheLM(model, tokenizer, caches, method, prefills, **options)


def test_fp16_equals_a_plain_pass_and_gear_does_not(smollm2, prefills, text):
    model = smollm2[0]
    exact, gear = (_lm(smollm2, prefills, method) for method in (Fp16(), Gear()))
    context = " ".join(text[:600].split()[:-1])
    choices = [" the", " of course", " a very long night without a moon"]
    requests = [Instance("loglikelihood", {}, (context, c), i) for i, c in enumerate(choices)]
    found = exact.loglikelihood(requests, disable_tqdm=True)
    compressed = gear.loglikelihood(requests, disable_tqdm=True)
    for choice, (loglikelihood, is_greedy), (through_gear, _) in zip(
        choices, found, compressed, strict=True
    ):
        tokens, answer = exact.encode_pair(context, choice)
        logits = model(mx.array([[*tokens, *answer]]))[0, len(tokens) - 1 : -1]
        rows = np.array(logits).astype(np.float64)
        rows -= np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True))
        rows -= np.array(logits).max(-1, keepdims=True)
        expected = sum(row[token] for row, token in zip(rows, answer, strict=True))
        assert loglikelihood == pytest.approx(expected, abs=1e-3)
        assert is_greedy == bool((rows.argmax(-1) == answer).all())
        assert abs(through_gear - loglikelihood) > 1e-3
    assert len(exact.encode_pair(context, choices[0])[1]) == 1


def test_rows_hold_the_blocks_of_batch_1(smollm2, prefills, text, monkeypatch):
    model, tokenizer = smollm2
    tokens = tokenizer.encode(text[:3000])
    prompts = [tokens[40 * i :][:n] for i, n in enumerate(LENGTHS)]
    gaps: list[float] = []

    class Watched:
        def __init__(self) -> None:
            self.layers, self.args = model.layers, model.args

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            logits = model(tokens, cache=cache)
            if type(cache[0]) is GearCache and tokens.shape[1] == 1:
                below, best = mx.sort(logits[0, -1])[-2:].tolist()
                gaps.append(best - below)
            return logits

    calls: dict[int, list[Any]] = {}
    left: list[Any] = []
    update, step = GearCache.update_and_fetch, BatchGearCache.update_and_fetch
    extract = BatchGearCache.extract

    def record(self: GearCache, keys: mx.array, values: mx.array) -> Any:
        if self.layer == 17:  # one layer stands for all
            calls.setdefault(id(self), [self]).append((keys, values))
        return update(self, keys, values)

    def record_step(self: BatchGearCache, keys: mx.array, values: mx.array) -> Any:
        for i, row in enumerate(self.rows):
            if row.layer == 17:
                calls[id(row)].append((keys[i : i + 1], values[i : i + 1]))
        return step(self, keys, values)

    def leave(self: BatchGearCache, idx: int) -> GearCache:
        left.append((self.rows[idx], extract(self, idx)))
        return left[-1][1]

    with routed(model) as route:
        alone = _lm((Watched(), tokenizer), prefills, Gear(), route=route)
        expected = [answer for answer, _ in alone.generate(prompts, [], NEW)]
        monkeypatch.setattr(GearCache, "update_and_fetch", record)
        monkeypatch.setattr(BatchGearCache, "update_and_fetch", record_step)
        monkeypatch.setattr(BatchGearCache, "extract", leave)
        together = _lm(smollm2, prefills, Gear(), route=route, batch_size=len(prompts))
        answers = [answer for answer, _ in together.generate(prompts, [], NEW)]
    for i, (answer, one) in enumerate(zip(answers, expected, strict=True)):
        both = zip(answer.tokens, one.tokens, strict=True)
        first = next((j for j, (a, b) in enumerate(both) if a != b), None)
        print(f"row {i}: first difference {first}, smallest gap {min(gaps[NEW * i :][:NEW]):.4f}")
        assert first is None or gaps[NEW * i + first] < GAP
    rows = [(row, leaving) for row, leaving in left if row.layer == 17]
    assert len(rows) == len(prompts)
    for row, leaving in rows:
        again = GearCache(row.settings, row.layer)
        for keys, values in calls[id(row)][1:]:
            again.update_and_fetch(keys, values)
        again.flush()
        assert again.offset == leaving.offset
        assert again.tokens_compressed == leaving.tokens_compressed
        for a, b in zip(again.segments, leaving.segments, strict=True):
            assert mx.array_equal(a.k.codes(), b.k.codes())
            assert mx.array_equal(a.v.codes(), b.v.codes())
        for x, y in zip(again.reconstruct(), leaving.reconstruct(), strict=True):
            assert mx.allclose(x, y, atol=1e-5)
    assert max(leaving.tokens_compressed for _, leaving in rows) == 128


def test_an_answer_ends_where_the_model_says_so(smollm2, prefills):
    lm = _lm(smollm2, prefills, Fp16())
    asked = lm.apply_chat_template([{"role": "user", "content": "Say only the word: yes"}])
    assert asked.endswith("assistant\n")
    ((answer, _),) = lm.generate([lm.tok_encode(asked)], [], 40)
    assert answer.stopped == "eos"
    assert answer.tokens[-1] == lm.eot_token_id
    assert "<|im_end|>" not in answer.text
    (cut,) = lm.generate_until(
        [Instance("generate_until", {}, (asked, {"until": [answer.text[1:3]]}), 0)]
    )
    assert cut == answer.text[: answer.text.find(answer.text[1:3])]


@pytest.mark.parametrize("until", ["\n\n", "Question:", "naïve é", "🙂 ok", " end.", "ion:\nA"])
def test_a_stop_string_is_found_with_its_last_token(smollm2, until):
    tokenizer = smollm2[1]
    tokens = tokenizer.encode(f"So it goes 🙃, naïf.\nQuestionnaire{until} and more\n\nThe end.")
    ending = Ending(tokenizer, [until], [], 10_000)
    first = next(n for n in range(1, len(tokens) + 1) if until in tokenizer.decode(tokens[:n]))
    assert [ending.reason(tokens[:n]) for n in range(1, first)] == [None] * (first - 1)
    assert ending.reason(tokens[:first]) == "string"
    assert ending.text(tokens[:first]) == tokenizer.decode(tokens).split(until)[0]
