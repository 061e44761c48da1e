"""The walk: which calls are made, what each of them sees, and when the bytes are taken."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.tasks.scoring import Arm, call_lengths, walk


@given(total=st.integers(1, 300), n_b=st.integers(1, 70), extra=st.integers(0, 140))
def test_calls_end_at_block_boundaries_and_never_count_as_prefill(total, n_b, extra):
    room = 1 + extra % (2 * n_b)
    lengths = call_lengths(total, n_b, room)
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    assert sum(lengths) == total
    assert max(lengths) <= n_b
    boundaries = {total, *range(room, total, n_b)}
    assert boundaries <= set(ends)
    assert all(end in boundaries for end in ends if end >= room)


def _walk(ctx, protocol="decode"):
    """Walk the first window; return its cost, the log-probabilities read and the caches."""
    parts, caches = [], ctx.make_caches()
    cost = walk(ctx, ctx.windows[0], Arm(ctx.method, caches), parts.append, protocol)
    return cost, mx.concatenate(parts), caches


@pytest.mark.parametrize(
    ("gear", "prefill", "scored", "calls"),
    [
        ({}, 96, 64, [32, 32]),
        ({}, 100, 64, [28, 32, 4]),
        ({"recent": 10}, 96, 64, [10, 32, 22]),  # 86 // 32 = 2 blocks, 32 of 42 in the buffer
        ({"n_sink": 4}, 96, 64, [4, 32, 28]),  # 92 past the sinks: 2 blocks and 28
        ({}, 20, 64, [12, 32, 20]),
        ({}, 0, 70, [32, 32, 6]),
        ({"recent": 10}, 0, 70, [32, 10, 28]),
        ({"n_sink": 4}, 0, 70, [32, 4, 32, 2]),
    ],
)
def test_decode_calls_of_gear(make_context, gear, prefill, scored, calls):
    ctx = make_context("gear", gear, prefill_tokens=prefill, scored_tokens=scored)
    _walk(ctx)
    assert ctx.model.calls == ([prefill, *calls] if prefill else calls)


@pytest.mark.parametrize(
    ("method", "settings", "calls"),
    [
        ("fp16", {"scored_tokens": 130}, [96, 64, 64, 2]),
        ("mlx_quant", {"scored_tokens": 130}, [96, 64, 64, 2]),
        ("gear", {"chunk": 24}, [96, 24, 24, 16]),
        ("gear", {"prefill_chunk": 40}, [40, 40, 16, 32, 32]),
        ("gear", {"protocol": "prefix"}, [96, 64]),
        ("gear", {"protocol": "oneshot"}, [160]),
        ("gear", {"prefill": "streaming", "prefill_chunk": 40}, [40, 40, 16, 32, 32]),
    ],
)
def test_calls_by_method_and_protocol(make_context, method, settings, calls):
    if method == "mlx_quant":
        pytest.importorskip("gear.mlx_quantized")
    ctx = make_context(method, **settings)
    if method == "mlx_quant":
        ctx.method.group_size = 32
    _, log_probs, _ = _walk(ctx, ctx.eval.protocol)
    assert ctx.model.calls == calls
    assert log_probs.shape == (ctx.eval.scored_tokens, 257)
    assert log_probs.dtype == mx.float32
    assert mx.allclose(mx.exp(log_probs).sum(-1), mx.array(1.0), atol=1e-5)


@pytest.mark.parametrize("prefill", [96, 100, 0])
@pytest.mark.parametrize("gear", [{}, {"recent": 7}, {"n_sink": 4}])
def test_decode_meets_the_states_of_token_by_token(make_context, prefill, gear):
    make = {"prefill_tokens": prefill, "scored_tokens": 70}
    blocks, single = make_context("gear", gear, **make), make_context("gear", gear, chunk=1, **make)
    in_blocks, a, _ = _walk(blocks)
    one_by_one, b, _ = _walk(single)
    assert mx.allclose(a, b, atol=2e-3)
    for name in ("accounted_bytes", "buffer_bytes", "stored_bytes", "tokens_compressed_min"):
        assert in_blocks["kv"][name] == one_by_one["kv"][name]


def test_oneshot_equals_fp16_and_decode_and_prefix_do_not(make_context):
    for protocol, equal in (("oneshot", True), ("decode", False), ("prefix", False)):
        gear, exact = (make_context(m, protocol=protocol) for m in ("gear", "fp16"))
        (_, a, _), (_, b, _) = _walk(gear, protocol), _walk(exact, protocol)
        assert bool(mx.allclose(a, b, atol=1e-4)) is equal


def test_fp16_in_calls_equals_one_pass(make_context):
    _, calls, _ = _walk(make_context("fp16"))
    _, oneshot, _ = _walk(make_context("fp16", protocol="oneshot"), "oneshot")
    assert mx.allclose(calls, oneshot, atol=1e-3)


def test_bytes_are_those_at_the_end_after_a_flush_but_before_the_call_of_prefix(make_context):
    decode, _, caches = _walk(make_context("gear"))
    assert decode["kv"] == caches.bytes()
    assert decode["kv"]["tokens_compressed_min"] == 160
    prefix, _, caches = _walk(make_context("gear", protocol="prefix"), "prefix")
    assert prefix["kv"]["tokens_compressed_min"] == 96
    assert prefix["kv"]["fp16_bytes"] == decode["kv"]["fp16_bytes"] * 96 // 160
    oneshot, _, _ = _walk(make_context("gear", protocol="oneshot"), "oneshot")
    assert oneshot["kv"]["tokens_compressed_min"] == 160


def test_streaming_prefill_sees_the_compressed_past(make_context):
    exact = make_context("gear", prefill_chunk=48)
    streaming = make_context("gear", prefill="streaming", prefill_chunk=48)
    (cost, a, _), (_, b, _) = _walk(streaming), _walk(exact)
    assert not mx.allclose(a, b, atol=1e-3)
    assert cost["timing"]["compress_s"] is None
    one_chunk = make_context("gear", prefill="streaming", prefill_chunk=2048)
    assert mx.allclose(_walk(one_chunk)[1], _walk(make_context("gear"))[1], atol=1e-5)


def test_a_reused_prefill_has_no_time(make_context):
    ctx = make_context("gear")
    first, again = _walk(ctx)[0], _walk(ctx)[0]
    assert ctx.model.calls == [96, 32, 32, 32, 32]
    assert first["timing"]["prefill_s"] > 0
    assert again["timing"]["prefill_s"] is None
    assert again["timing"]["compress_s"] > 0
    assert again["cache_classes"] == {"before": {"GearCache": 2}, "after": {"GearCache": 2}}


def test_a_reused_prefill_counts_in_the_peak(make_context):
    ctx = make_context("fp16", prefill_tokens=288, scored_tokens=1)
    _walk(ctx)
    again, _, _ = _walk(ctx)
    assert again["timing"]["prefill_s"] is None
    assert again["peak_bytes"] >= 2 * ctx.prefills.nbytes  # the prefill, and the arm's own copy
