"""CacheLM on tiny models: plain passes, lm-eval's windows, batches, and what ends a text."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from mlx_lm.models.cache import KVCache

from evals import lm as lm_module
from evals import tiny
from evals.caches import Caches, make_caches
from evals.engine import log_probs
from evals.generation import Ending
from evals.lm import CacheLM, Scored
from evals.prefill import PrefillStore
from gear.batch import BatchGearCache
from gear.cache import GearCache
from gear.config import GearConfig
from gear.exact import ExactCache
from gear.methods import METHODS, load_method
from gear.routing import routed
from tests.gear import tiny_models

GAP = 0.05
TOKENS = [(7 * i * i + 3 * i + 5) % 251 for i in range(400)]
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3


class Watched:
    """A model that notes the shape of its calls, and the top-2 gap of each row's last token."""

    def __init__(self, model: Any, max_length: int | None = None) -> None:
        self.model, self.layers, self.calls, self.gaps = model, model.layers, [], []
        self.args = SimpleNamespace(max_position_embeddings=max_length)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        self.calls.append(tokens.shape)
        logits = self.model(tokens, cache=cache)
        best = mx.sort(logits[:, -1], axis=-1)[:, -2:]
        self.gaps.append((best[:, 1] - best[:, 0]).tolist())
        return logits


class Said:
    """A model that always says the same behind the same token, whatever its caches hold."""

    def __init__(self, model: Any, follows: dict[int, int]) -> None:
        self.model, self.layers, self.follows, self.steps = model, model.layers, follows, 0

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        self.steps += type(cache[0]) is not KVCache  # a prefill's are plain
        rows: Any = tokens.tolist()
        said = mx.array([[self.follows.get(token, 0) for token in row] for row in rows])
        return mx.eye(257)[said] * 9 + 0 * self.model(tokens, cache=cache)


class Pieces:
    """A tokenizer whose tokens are pieces of text; number 9 is EOS."""

    bos_token_id, eos_token_id = None, 9
    pieces = ("", "He", "llo\n", "\nQ", "u", "estion:", " x", "é", "end", "</s>")

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(text)]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab_size": 257, "seed": 0}
    return tiny.build(sizes)


@pytest.fixture
def make_lm() -> Iterator[Callable[..., CacheLM]]:
    """Return a function from a model, a method's name, GEAR's numbers and options to a CacheLM."""
    with ExitStack() as stack:

        def make(
            model: Any, name: str = "fp16", gear: dict[str, Any] | None = None, *,
            packed: bool = False, tokenizer: Any = None, layer: Any = None, **options: Any,
        ) -> CacheLM:  # fmt: skip
            numbers = {"group_size": 32, "n_b": 32, "sparse_frac": 0.1, **(gear or {})}
            made = load_method(METHODS[name])
            method = made(settings=GearConfig(**numbers)) if made.uses_gear else made()
            if name == "mlx_quant":
                method.group_size = 32
            inner = model.model if isinstance(model, Watched | Said) else model
            route = stack.enter_context(routed(inner)) if packed else None

            def caches() -> Caches:
                fresh = make_caches(inner, method, route)
                for i in fresh.covered if layer else ():
                    fresh.layers[i] = layer(fresh.layers[i])
                return fresh

            tokens = tokenizer or tiny.ByteTokenizer()
            return CacheLM(model, tokens, caches, method, PrefillStore(), **options)

        yield make


def _log_probs(model: Any, tokens: list[int]) -> np.ndarray:
    """Return the log-probabilities [tokens, vocabulary] of one plain pass, in fp64."""
    logits = np.array(model(mx.array([tokens]))[0].astype(mx.float32)).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def _plain(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return a continuation's log-likelihood and whether it is greedy, by one plain pass."""
    found = _log_probs(model, [*context, *continuation])[len(context) - 1 : -1]
    picked = [row[token] for row, token in zip(found, continuation, strict=True)]
    return float(sum(picked)), bool((found.argmax(axis=-1) == continuation).all())


def _greedy(model: Any, context: list[int], n: int) -> list[int]:
    """Return ``n`` greedy tokens by plain passes."""
    tokens = list(context)
    for _ in range(n):
        tokens.append(int(_log_probs(model, tokens)[-1].argmax()))
    return tokens[len(context) :]


# -- log-likelihoods ---------------------------------------------------------------------------


@pytest.mark.parametrize("context", [1, 2, 40, 150])
def test_fp16_equals_plain_passes(model, make_lm, context):
    prompt = TOKENS[:context]
    best = _greedy(model, prompt, 3)
    choices = [
        [5], [9], best[:1], best, [*best[:2], 7], [11, 12, 13, 14, 15], TOKENS[200:290],
    ]  # fmt: skip
    watched = Watched(model)
    found, cost = make_lm(watched).score(prompt, choices)
    for scored, choice in zip(found, choices, strict=True):
        expected, is_greedy = _plain(model, prompt, choice)
        assert scored.loglikelihood == pytest.approx(expected, abs=1e-3)
        assert scored.is_greedy is is_greedy
    assert [scored.is_greedy for scored in found] == [False, False, True, True, False, False, False]
    # one feed for all single tokens, one for the two that differ in their last token only
    prefill = [context - 1] if context > 1 else []
    assert [n for _, n in watched.calls] == [*prefill, 1, 3, 5, 64, 26]
    assert cost["tokens"] == sum(map(len, choices))
    assert cost["timing"]["fed_tokens"] == 1 + 3 + 5 + 90


def test_requests_equal_plain_passes_in_their_order(model, make_lm):
    pairs = [
        (TEXT[:60], " wisdom"), (TEXT[:90], " x"), (TEXT[:60], " foolishness"), ("", "It was"),
        (TEXT[:60] + "  ", "spaces"), (TEXT[:60], "!"),
    ]  # fmt: skip
    watched = Watched(model)
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = make_lm(watched).loglikelihood(requests, disable_tqdm=True)
    for (context, continuation), (loglikelihood, is_greedy) in zip(pairs, found, strict=True):
        kept = context.rstrip()  # spaces at the end belong to the continuation
        scored = context[len(kept) :] + continuation
        expected = _plain(model, list(kept.encode()) or [tiny.BOS], list(scored.encode()))
        assert loglikelihood == pytest.approx(expected[0], abs=1e-3)
        assert is_greedy is expected[1]
    assert sum(shape == (1, len(TEXT[:60].rstrip()) - 1) for shape in watched.calls) == 1


def test_pairs_are_split_as_lm_eval_splits_them(model, make_lm, monkeypatch):
    seen: list[Any] = []
    made = make_lm(model)
    monkeypatch.setattr(made, "_loglikelihood_tokens", lambda new, **_: seen.extend(new))
    pairs = [("a b", " c"), ("a b  ", "c"), ("", "c"), ("", chr(0) + "c"), ("é", "é ")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    TemplateLM.loglikelihood(made, requests, disable_tqdm=True)
    assert [made.encode_pair(*pair) for pair in pairs] == [(c, t) for _, c, t in seen]
    assert made.encode_pair("  ", "c") == ([tiny.BOS], list(b"  c"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("extra", [{}, {"n_sink": 4, "recent": 7}])
def test_gear_scores_what_token_by_token_would(model, make_lm, packed, extra):
    made = make_lm(model, "gear", extra, packed=packed)
    context, choices = TOKENS[:121], [TOKENS[200:270], [3], [3, 4, 5]]
    found, cost = made.score(context, choices)
    for scored, choice in zip(found, choices, strict=True):
        caches, total = made._engine.start(context).caches, 0.0
        for fed, token in zip([context[-1], *choice[:-1]], choice, strict=True):
            logits = model(mx.array([[fed]]), cache=caches.layers)[0, 0]
            total += (logits[token] - mx.logsumexp(logits)).item()
        assert scored.loglikelihood == pytest.approx(total, abs=5e-3)
        assert abs(scored.loglikelihood - _plain(model, context, choice)[0]) > 1e-2
    assert (cost["context_tokens"], cost["context_compressed"]) == (121, 96)
    assert cost["kv"]["tokens_compressed_min"] == 160  # 121 + 69 tokens, two more blocks
    assert cost["cache_classes"] == {"before": {"GearCache": 2}, "after": {"GearCache": 2}}


def test_a_copy_keeps_the_route_and_leaves_the_original(model, make_lm):
    caches = make_lm(model, "gear", packed=True)._engine.start(TOKENS[:100]).caches
    copied = copy.deepcopy(caches)
    assert copied.coverage["packed_layers"] == 2
    assert copied.layers[0].route is caches.layers[0].route
    before = [mx.array(a) for a in caches.layers[0].reconstruct()]
    mx.eval(model(mx.array([TOKENS[:40]]), cache=copied.layers))
    assert (copied.layers[0].offset, caches.layers[0].offset) == (139, 99)
    for old, now in zip(before, caches.layers[0].reconstruct(), strict=True):
        assert mx.array_equal(old, now)


@pytest.mark.parametrize("name", ["fp16", "gear"])
def test_a_shared_prefix_changes_only_the_last_digits(model, make_lm, name):
    prefix, alone, shared = (
        TOKENS[:70],
        make_lm(model, name),
        make_lm(watched := Watched(model), name),
    )
    for i in range(3):
        context = [*prefix, *TOKENS[100 + i : 140]]
        expected, cost = alone.score(context, [[1], [2, 3]])
        found, cost_shared = shared.score(context, [[1], [2, 3]], shared=70)
        for a, b in zip(found, expected, strict=True):
            assert a.loglikelihood == pytest.approx(b.loglikelihood, abs=1e-3)
        assert cost["kv"]["stored_bytes"] == cost_shared["kv"]["stored_bytes"]
        # a rate would count the tokens of a prefix that was there already
        assert (cost_shared["timing"]["prefill_s"] is None) is (i > 0)
    lengths = [n for _, n in watched.calls]
    assert lengths == [70, 39, 1, 2, 38, 1, 2, 37, 1, 2]


def test_a_streaming_prefill_sees_the_compressed_past(model, make_lm):
    exact, streaming = (make_lm(model, "gear", prefill=p) for p in ("exact", "streaming"))
    streaming._engine.prefiller.__dict__["chunk"] = 48
    (a,), _ = exact.score(TOKENS[:150], [[7]])
    (b,), cost = streaming.score(TOKENS[:150], [[7]])
    assert abs(a.loglikelihood - b.loglikelihood) > 1e-4
    assert cost["timing"]["compress_s"] is None


def test_long_contexts_are_cut_on_the_left_with_one_warning(model, make_lm, caplog):
    made = make_lm(Watched(model, 48))
    with caplog.at_level(logging.WARNING):
        requests: Any = [("", TOKENS[:90], choice) for choice in ([1], [2, 3, 4], [5])]
        found = made._loglikelihood_tokens(requests)
        assert len(made.score(TOKENS[:90], [[1], [2, 3, 4]], shared=10)[0]) == 2
        assert made.generate([TOKENS[:90]], [], 8)[0][1]["context_tokens"] == 40
    assert len(caplog.records) == 1
    for (_, context, choice), (loglikelihood, _) in zip(requests, found, strict=True):
        kept = [*context, *choice][-49:]  # what lm-eval's HFLM keeps
        expected, _ = _plain(model, kept[: -len(choice)], choice)
        assert loglikelihood == pytest.approx(expected, abs=1e-3)
    with pytest.raises(ValueError, match="maximum length of 48 leaves none"):
        made.score(TOKENS[:5], [TOKENS[:49]])
    with pytest.raises(ValueError, match="shorten"):
        made.generate([TOKENS[:5]], [], 48)


def test_a_large_vocabulary_is_summed_precisely():
    logits = 3 * mx.random.normal((4, 50_001), key=mx.random.key(0))
    tokens = mx.array([[5, 50_000], [0, 1], [7, 8], [300, 20_000]])
    exact = np.array(logits).astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    expected = np.take_along_axis(exact, np.array(tokens), axis=-1)
    assert np.abs(np.array(log_probs(logits, tokens)) - expected).max() < 5e-6


@pytest.mark.parametrize("continuations", [[], [[1], []]])
def test_nothing_to_score_is_an_error(model, make_lm, continuations):
    with pytest.raises(ValueError, match="at least one token each"):
        make_lm(model).score(TOKENS[:5], continuations)


# -- rolling -----------------------------------------------------------------------------------


def test_rolling_windows_are_those_of_lm_eval(model, make_lm, monkeypatch):
    made, seen = make_lm(model), []

    def score(context: list[int], continuations: list[list[int]], shared: int = 0) -> Any:
        seen.append((context, continuations[0]))
        return [Scored(-float(len(continuations[0])), False)], {}

    monkeypatch.setattr(made, "score", score)
    monkeypatch.setattr(lm_module, "merged_costs", lambda costs: costs)
    draw = random.Random(0)  # noqa: S311
    for _ in range(200):
        length, window = draw.randint(1, 300), draw.randint(1, 120)
        tokens = [draw.randrange(250) for _ in range(length)]
        seen.clear()
        assert made.rolling(tokens, window)[0] == -length
        theirs = get_rolling_token_windows(tokens, tiny.BOS, window, 1)
        assert seen == [make_disjoint_window(pair) for pair in theirs]
        assert [token for _, scored in seen for token in scored] == tokens  # each once, in order
        ends = np.cumsum([len(scored) for _, scored in seen])
        for (context, scored), end in zip(seen, ends, strict=True):
            behind = [tiny.BOS, *tokens][: end - len(scored) + 1]
            assert context == behind[-len(context) :]
            assert len(context) + len(scored) - 1 == (window if end > window else end)


@pytest.mark.parametrize(("length", "window"), [(1, 40), (39, 40), (40, 40), (41, 40), (150, 64)])
def test_rolling_equals_plain_passes_of_each_window(model, make_lm, length, window):
    expected = 0.0
    for fed, targets in get_rolling_token_windows(TOKENS[:length], tiny.BOS, window, 1):
        rows = _log_probs(model, fed)[-len(targets) :]
        expected += sum(row[token] for row, token in zip(rows, targets, strict=True))
    found, cost = make_lm(model).rolling(TOKENS[:length], window)
    assert found == pytest.approx(expected, abs=1e-3)
    assert cost["tokens"] == length


def test_rolling_requests_take_the_models_length(model, make_lm):
    made, text = make_lm(Watched(model, 64)), TEXT[:130]
    (found,) = made.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    assert found == made.rolling(list(text.encode()), 64)[0]
    with pytest.raises(ValueError, match="nothing to score"):
        made.rolling([])


# -- what the guards look at -------------------------------------------------------------------


class Silent(GearCache):
    """A cache that says it is GEAR's and compresses nothing."""

    due_tokens = 0  # type: ignore[assignment]

    def __init__(self, real: GearCache) -> None:
        super().__init__(real.settings, real.layer)


class Inheriting(ExactCache):
    """A cache of a class of its own that inherits mlx-lm's merge, which makes it an exact one."""

    def __init__(self, _real: Any) -> None:
        super().__init__()


def test_single_tokens_see_the_compressed_cache(model, make_lm):
    letters = [[i] for i in range(60, 64)]
    found = {}
    for name, options in (("fp16", {}), ("gear", {}), ("silent", {"layer": Silent})):
        made = make_lm(model, "fp16" if name == "fp16" else "gear", **options)
        found[name], cost = made.score(TOKENS[:129], letters)
        assert cost["context_compressed"] == (128 if name == "gear" else 0)
        assert cost["kv"]["tokens_compressed_min"] == (128 if name == "gear" else 0)
    for exact, gear, silent in zip(*found.values(), strict=True):
        assert abs(gear.loglikelihood - exact.loglikelihood) > 1e-3
        assert silent.loglikelihood == pytest.approx(exact.loglikelihood, abs=1e-4)


def test_a_silent_cache_shows_in_rolling_and_generation(model, make_lm):
    exact, gear = make_lm(model), make_lm(model, "gear")
    silent = make_lm(model, "gear", layer=Silent, batch_size=2)
    nats, cost = silent.rolling(TOKENS[:150], 100)
    assert nats == pytest.approx(exact.rolling(TOKENS[:150], 100)[0], abs=1e-3)
    assert cost["kv"]["tokens_compressed_min"] == 0
    assert abs(gear.rolling(TOKENS[:150], 100)[0] - nats) > 1e-2
    assert gear.rolling(TOKENS[:150], 100)[1]["kv"]["tokens_compressed_min"] > 0
    prompts = [TOKENS[:100], TOKENS[50:120]]
    answers = [m.generate(prompts, [], 6) for m in (exact, silent, gear)]
    for (a, _), (b, cost), (c, real) in zip(*answers, strict=True):
        assert a.tokens == b.tokens
        assert a.loglikelihood == pytest.approx(b.loglikelihood, abs=1e-3)
        assert cost["kv"]["tokens_compressed_min"] == cost["context_compressed"] == 0
        assert a.loglikelihood != pytest.approx(c.loglikelihood, abs=1e-3)
        assert real["kv"]["tokens_compressed_min"] >= 64


def test_a_cache_that_a_batch_makes_exact_shows_as_another_class(model, make_lm):
    made = make_lm(model, "gear", layer=Inheriting, batch_size=2)
    _, cost = made.generate([TOKENS[:40], TOKENS[:30]], [], 3)[0]
    assert cost["cache_classes"] == {"before": {"Inheriting": 2}, "after": {"KVCache": 2}}
    assert cost["kv"]["tokens_compressed_min"] == 0


# -- generation --------------------------------------------------------------------------------

LENGTHS = [1, 3, 17, 33, 34, 60, 65, 66, 90, 97, 100, 120, 130, 140, 150, 160]


@pytest.mark.parametrize("name", ["fp16", "gear"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_greedy(model, make_lm, name, batch_size):
    made = make_lm(model, name, batch_size=batch_size)
    prompts = [TOKENS[i : i + n] for i, n in enumerate([5, 40, 1, 70])]
    for prompt, (answer, cost) in zip(prompts, made.generate(prompts, [], 20), strict=True):
        assert len(answer.tokens) == 20
        assert answer.stopped == "length"
        assert cost["tokens"] == cost["timing"]["fed_tokens"] == 20
        assert cost["context_tokens"] == len(prompt)
        assert cost["cache_classes"]["after"] == cost["cache_classes"]["before"]
        if name == "fp16":
            expected = _plain(model, prompt, answer.tokens)
            assert answer.tokens == _greedy(model, prompt, 20)
            assert answer.loglikelihood == pytest.approx(expected[0], abs=1e-3)


def _fed(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, list[Any]], list[Any]]:
    """Note the K and V of every call of every GearCache, and what leaves a batch for which row."""
    calls: dict[int, list[Any]] = {}
    left: list[Any] = []
    update, step = GearCache.update_and_fetch, BatchGearCache.update_and_fetch
    extract = BatchGearCache.extract

    def record(self: GearCache, keys: mx.array, values: mx.array) -> Any:
        calls.setdefault(id(self), [self]).append((keys, values))
        return update(self, keys, values)

    def record_step(self: BatchGearCache, keys: mx.array, values: mx.array) -> Any:
        noted = [len(calls.setdefault(id(row), [row])) for row in self.rows]
        found = step(self, keys, values)
        for i, (row, before) in enumerate(zip(self.rows, noted, strict=True)):
            if len(calls[id(row)]) == before:  # the rows decoded together
                calls[id(row)].append((keys[i : i + 1], values[i : i + 1]))
        return found

    def leave(self: BatchGearCache, idx: int) -> GearCache:
        left.append((self.rows[idx], extract(self, idx)))
        return left[-1][1]

    monkeypatch.setattr(GearCache, "update_and_fetch", record)
    monkeypatch.setattr(BatchGearCache, "update_and_fetch", record_step)
    monkeypatch.setattr(BatchGearCache, "extract", leave)
    return calls, left


def assert_same_blocks(one: GearCache, other: GearCache) -> None:
    """Require equal codes and arrays of every block, and equal exact tokens."""
    assert (one.offset, len(one.segments)) == (other.offset, len(other.segments))
    for a, b in zip(one.segments, other.segments, strict=True):
        for x, y in ((a.k, b.k), (a.v, b.v)):
            assert x.kind == y.kind
            assert mx.array_equal(x.codes(), y.codes())
            assert {n: v.dtype for n, v in x.arrays.items()} == {
                n: v.dtype for n, v in y.arrays.items()
            }
    for x, y in zip(one.reconstruct(), other.reconstruct(), strict=True):
        assert mx.allclose(x, y, atol=1e-5)


@pytest.mark.parametrize(("packed", "batch_size"), [(True, 16), (False, 5)])
def test_rows_of_a_batch_hold_the_blocks_of_batch_1(
    model, make_lm, monkeypatch, packed, batch_size
):
    prompts = [TOKENS[3 * i :][:n] for i, n in enumerate(LENGTHS)]
    alone = make_lm(watched := Watched(model), "gear", packed=packed)
    expected = [alone.generate([prompt], [], 40)[0] for prompt in prompts]
    gaps = [row[0] for shape, row in zip(watched.calls, watched.gaps, strict=True) if shape[1] == 1]
    calls, left = _fed(monkeypatch)
    made = make_lm(watched := Watched(model), "gear", packed=packed, batch_size=batch_size)
    answers = made.generate(prompts, [], 40)
    assert (batch_size, 1) in watched.calls
    differing = 0
    for i, ((answer, cost), (one, cost_one)) in enumerate(zip(answers, expected, strict=True)):
        same = [a == b for a, b in zip(answer.tokens, one.tokens, strict=True)]
        if not all(same):
            differing += 1
            assert gaps[40 * i + same.index(False)] < GAP
        else:
            assert answer.text == one.text
            assert answer.loglikelihood == pytest.approx(one.loglikelihood, abs=1e-2)
        for name in ("stored_bytes", "fp16_bytes", "tokens_compressed_min"):
            assert cost["kv"][name] == cost_one["kv"][name]
        assert cost["cache_classes"] == cost_one["cache_classes"]
    assert differing <= 2
    assert len(left) == 2 * len(prompts)
    for row, leaving in left:  # fed the same K and V by itself, it is the same
        again = GearCache(row.settings, row.layer)
        for keys, values in calls[id(row)][1:]:
            again.update_and_fetch(keys, values)
        again.flush()
        assert_same_blocks(leaving, again)


@pytest.mark.parametrize("name", ["fp16", "gear"])
def test_sliding_windows_are_batched_too(make_lm, name):
    model = tiny_models.build("gemma3_text")
    prompts = [TOKENS[i : i + n] for i, n in enumerate([90, 5, 40, 64])]
    alone, together = (make_lm(model, name, batch_size=size) for size in (1, 3))
    expected = alone.generate(prompts, [], 12)
    for (a, cost), (b, cost_b) in zip(together.generate(prompts, [], 12), expected, strict=True):
        assert a.tokens == b.tokens
        assert cost["cache_classes"]["after"] == cost_b["cache_classes"]["before"]
    for prompt in prompts[:2]:
        context = prompt[:-1]
        found, _ = alone.score(prompt, [[3, 4]], shared=len(context) // 2)
        plain, _ = alone.score(prompt, [[3, 4]])
        assert found[0].loglikelihood == pytest.approx(plain[0].loglikelihood, abs=1e-3)
        if name == "fp16":
            exact = _plain(model, prompt, [3, 4])
            assert plain[0].loglikelihood == pytest.approx(exact[0], abs=1e-3)


def test_caches_that_cannot_be_batched_run_one_at_a_time(model, make_lm, caplog):
    alone = make_lm(model, "mlx_quant")
    together = make_lm(watched := Watched(model), "mlx_quant", batch_size=4)
    prompts = [TOKENS[:20], TOKENS[5:50], TOKENS[1:9]]
    with caplog.at_level(logging.WARNING):
        answers = [together.generate(prompts, [], 5) for _ in range(2)]
    assert [record.message.split(":")[0] for record in caplog.records] == ["cache=mlx_quant"]
    assert {rows for rows, _ in watched.calls} == {1}
    for got in answers:
        assert [a for a, _ in got] == [a for a, _ in alone.generate(prompts, [], 5)]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_generations_share_a_prefix(model, make_lm, batch_size):
    alone, shared = (make_lm(w, "gear", batch_size=batch_size) for w in (model, Watched(model)))
    prompts = [[*TOKENS[:70], *TOKENS[100 + i :][:30]] for i in range(3)]
    expected, found = alone.generate(prompts, [], 8), shared.generate(prompts, [], 8, shared=70)
    for (a, cost_a), (b, cost_b) in zip(expected, found, strict=True):
        assert a.tokens == b.tokens
        assert cost_a["kv"]["stored_bytes"] == cost_b["kv"]["stored_bytes"]
    calls = shared._engine.model.calls
    assert [n for _, n in calls if n > 1] == [70, 29, 29, 29]


# -- what ends a text --------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("follows", "until", "text", "tokens", "stopped"),
    [
        ({1: 2, 2: 3, 3: 4, 4: 5, 5: 6}, ["\n\n"], "llo", [2, 3], "string"),
        ({1: 2, 2: 3, 3: 4, 4: 5, 5: 6}, ["Question:", "ion"], "llo\n\n", [2, 3, 4, 5], "string"),
        ({1: 2, 2: 3, 3: 4, 4: 5, 5: 6}, ["never", ""], "llo\n\nQuestion: x", [2, 3, 4, 5, 6], ""),
        ({1: 7, 7: 8, 8: 9}, ["x"], "éend", [7, 8, 9], "eos"),
        ({1: 7, 7: 8, 8: 9}, ["éen"], "", [7, 8], "string"),
        ({1: 9}, [], "", [9], "eos"),
    ],
)
def test_a_text_ends_at_once(model, make_lm, batch_size, follows, until, text, tokens, stopped):
    said = Said(model, follows)
    made = make_lm(said, "gear", tokenizer=Pieces(), batch_size=batch_size)
    limit = 5 if not stopped else 50
    prompts = [[4, 5, 1], [*TOKENS[:40], 1], [1]][: max(batch_size, 1)]
    for answer, cost in made.generate(prompts, until, limit):
        assert (answer.text, answer.tokens) == (text, tokens)
        assert answer.stopped == (stopped or "length")
        assert cost["timing"]["fed_tokens"] == len(tokens)
    assert said.steps == len(tokens)  # nothing was fed behind the end


def test_rows_that_end_make_room_for_the_next(model, make_lm):
    said = Said(model, {1: 2, 2: 3, 4: 5, 5: 6, 6: 7, 7: 8, 8: 9})
    made = make_lm(said, "gear", tokenizer=Pieces(), batch_size=2)
    answers = [answer for answer, _ in made.generate([[1], [4], [7], [1], [4, 1]], ["\n\n"], 9)]
    assert [a.tokens for a in answers] == [[2, 3], [5, 6, 7, 8, 9], [8, 9], [2, 3], [2, 3]]
    assert said.steps == 7  # 13 tokens in two places: 2+2+2 and 5+2


@pytest.mark.parametrize("until", [["é"], ["ßé"], ["b", "zzz"], [" é!"]])
def test_a_stop_string_is_found_with_its_last_byte(until):
    tokens = tiny.ByteTokenizer().encode("aaa ßé! é! b")
    ending = Ending(tiny.ByteTokenizer(), until, [], 99)
    whole = [tiny.ByteTokenizer().decode(tokens[:n]) for n in range(1, len(tokens) + 1)]
    first = next(i for i, text in enumerate(whole) if any(u in text for u in until))
    assert [ending.reason(tokens[: i + 1]) for i in range(first)] == [None] * first
    assert ending.reason(tokens[: first + 1]) == "string"
    cut = min(whole[-1].find(u) for u in until if u in whole[-1])
    assert ending.text(tokens) == whole[-1][:cut]


def test_requests_are_answered_in_their_order(model, make_lm):
    made = make_lm(Said(model, {1: 2, 2: 3, 3: 4, 4: 9}), tokenizer=Pieces(), batch_size=2)
    options: list[dict[str, Any]] = [
        {"until": ["\n\n"], "max_gen_toks": 8}, {"until": "Q"}, {"max_gen_toks": 1},
        {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0},
    ]  # fmt: skip
    requests = [Instance("generate_until", {}, ("He", o), i) for i, o in enumerate(options)]
    assert made.generate_until(requests) == ["llo", "llo\n\n", "llo\n", "llo"]
    for bad in ({"do_sample": True}, {"temperature": 0.7}):
        with pytest.raises(ValueError, match="only greedy decoding"):
            made.generate_until([Instance("generate_until", {}, ("He", bad), 0)])


def test_wrong_limits_are_refused(model, make_lm):
    with pytest.raises(ValueError, match="batch_size=0"):
        make_lm(model, batch_size=0)
    with pytest.raises(ValueError, match="max_new=0"):
        make_lm(model).generate([[1]], [], 0)


# -- tokens ------------------------------------------------------------------------------------


def test_bos_is_added_where_it_is_asked_for(model, make_lm):
    plain, with_bos = make_lm(model), make_lm(model, add_bos=True)
    assert plain.tok_encode("ab") == [97, 98]
    assert with_bos.tok_encode("ab") == [tiny.BOS, 97, 98]
    assert with_bos.tok_encode("ab", add_special_tokens=False) == [97, 98]
    assert with_bos.encode_pair("a", "b") == ([tiny.BOS, 97], [98])
    assert plain.prefix_token_id == tiny.BOS
    with pytest.raises(ValueError, match="no special token"):
        _ = plain.eot_token_id
    with pytest.raises(ValueError, match="chat_template"):
        plain.apply_chat_template([{"role": "user", "content": "a"}])
    assert plain.tokenizer_name == with_bos.tokenizer_name


@pytest.mark.parametrize("kind", ["score", "rolling", "generate"])
def test_a_cost_is_that_of_a_window_and_the_context(model, make_lm, kind):
    made = make_lm(model, "gear")
    asked = {
        "score": partial(made.score, TOKENS[:100], [[1]]),
        "rolling": partial(made.rolling, TOKENS[:100]),
        "generate": lambda: made.generate([TOKENS[:100]], [], 3)[0],
    }
    _, cost = asked[kind]()
    assert set(cost) == {
        "tokens", "kv", "cache_classes", "timing", "peak_bytes", "context_tokens",
        "context_compressed",
    }  # fmt: skip
    assert set(cost["timing"]) == {
        "prefill_tokens", "prefill_s", "compress_s", "fed_tokens", "score_s",
    }  # fmt: skip
    assert cost["timing"]["score_s"] > 0
    assert cost["peak_bytes"] > 0
    assert cost["kv"]["stored_bytes"] < cost["kv"]["fp16_bytes"]
