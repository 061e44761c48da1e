"""scripts/bench.py on tiny sizes: what each bench's rows say, the files it writes, its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from evals.compose import plan

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))  # as Python does for `python scripts/bench.py`

import bench  # noqa: E402
from benches import (  # noqa: E402
    attention,
    batch,
    compress,
    decode,
    llama,
    memory,
    report,
    sweep,
    timing,
)
from benches.timing import Options, Row  # noqa: E402

TINY_LLAMA = {
    "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 64,
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every size small enough for a test."""
    monkeypatch.setattr(llama, "SHAPE", {**llama.SHAPE, **TINY_LLAMA})
    monkeypatch.setattr(llama, "ON_A_CPU", {})
    monkeypatch.setattr(compress, "SHAPE", (1, 2, 128, 64))
    monkeypatch.setattr(decode, "LAYER_SHAPE", (2, 64))
    monkeypatch.setattr(decode, "QUERY_HEADS", 4)
    for name, value in {"QUERY_HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 64}.items():
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(attention, "BAR_TOKENS", {"cpu": 256, "gpu": 256})
    monkeypatch.setattr(attention, "CHAINED", {"cpu": 1, "gpu": 2})


def on(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Let the benches take this machine for a CPU or a GPU."""
    for module in (attention, batch, compress, decode, llama, memory):
        monkeypatch.setattr(module, "device", lambda: device)


def bars(rows: list[Row]) -> list[str]:
    return [row["bar"] for row in rows if row["bar"]]


def named(rows: list[Row], start: str) -> Row:
    """Return the only row whose name begins so."""
    [found] = [row for row in rows if row["name"].startswith(start)]
    return found


def check(rows: list[Row]) -> None:
    """Check what holds for the rows of every bench."""
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)
    for row in rows:
        measured = row.keys() & {"median_ms", "mib", "ratio"}
        assert measured or "not installed" in row["name"], row
        assert all(row[key] > 0 for key in measured), row


@pytest.mark.usefixtures("tiny")
def test_compress_keeps_its_rows() -> None:
    rows = compress.run(Options(repeats=2))
    check(rows)
    assert [row["name"] for row in rows[:3]] == ["low rank, power", "block of K", "block of V"]
    assert bars(rows) == ["at least 100", "at least 10", "at least 10", "at most 4"]


@pytest.mark.usefixtures("tiny")
def test_attention_on_a_cpu_has_a_bar_for_one_query_and_for_a_chunk() -> None:
    rows = attention.run(Options(repeats=1, tokens=(128, 256), fill=128))
    check(rows)
    assert len(rows) == 2 * 2 * 6 + 2
    assert bars(rows) == ["at most 3x", "at most 1.7x"]
    for name in ("exact", "mlx-lm quantized, 2 bits", "GEAR 2-bit, s=2%", "GEAR 2-bit, s=0%"):
        for what in ("one query", "a chunk of 64"):
            assert any(row["name"] == f"{name}: {what}, N=128" for row in rows)
    one = [row for row in rows if row["name"].endswith("one query, N=256")]
    timed = next(row for row in one if row["name"].startswith("GEAR 2-bit, s=2%"))
    assert timed["ratio"] == pytest.approx(timed["median_ms"] / one[0]["median_ms"])
    assert named(rows, "GEAR 2-bit, s=2%: one query, N=256, its")["ratio"] == timed["ratio"]


@pytest.mark.usefixtures("tiny")
def test_attention_on_a_gpu_has_a_bar_for_each_sparse_frac(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, "gpu")
    rows = attention.run(Options(repeats=1, tokens=(256,), dtype="float32"))
    check(rows)
    assert sorted(bars(rows)) == ["at least 1.5x", "at least 2x"]
    faster = named(rows, "GEAR 2-bit, s=0%: one query, N=256, times faster")
    own = next(row for row in rows if row["name"] == "GEAR 2-bit, s=0%: one query, N=256")
    assert faster["bar"] == "at least 2x"
    assert faster["ratio"] == pytest.approx(1 / own["ratio"])


@pytest.mark.usefixtures("tiny")
def test_every_attention_gives_what_exact_attention_gives() -> None:
    kinds = attention._kinds(256, mx.float32, 128)
    queries = mx.random.normal((1, 4, 64, 64), key=mx.random.key(5))
    exact = kinds.pop("exact")(queries, "causal")
    for name, attend in kinds.items():
        error = mx.linalg.norm(attend(queries, "causal") - exact) / mx.linalg.norm(exact)
        assert error.item() < (0.02 if "8 bits" in name else 0.9), name
    assert not mx.allclose(exact, attention.attend(queries, _shuffled(), 0.1, "causal"))


def _shuffled() -> Any:
    """A cache of other tokens."""
    keys, values = mx.random.normal((2, 1, 2, 256, 64), key=mx.random.key(9))
    return attention._filled(keys, values, 0.02, 128)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_memory_compares_decode_and_prefill_with_fp16(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    on(monkeypatch, device)
    rows = memory.run(Options(context=512, chunk=128, fill=256, dtype="float32"))
    check(rows)
    assert bars(rows) == ["at most 0.4x", "at most 0.6x"]
    for phase in ("decode", "prefill"):
        for kind in memory._kinds(phase):
            row = named(rows, f"{kind}: {phase} at 512 tokens, 2 layers in float32")
            fp16 = named(rows, f"fp16: {phase}")
            assert row["ratio"] == pytest.approx(row["mib"] / fp16["mib"])
        bar = named(rows, f"GEAR 2-bit's peak over fp16's: {phase}")
        assert bar["ratio"] == named(rows, f"GEAR 2-bit: {phase}")["ratio"]


@pytest.mark.usefixtures("tiny")
def test_decode_measures_a_step_in_which_a_block_forms() -> None:
    model = llama.build(None, mx.float32)
    with llama.caches_of("GEAR 2-bit", model) as caches:
        llama.fill(caches, (2, 64), 512 - memory.SHORT_OF_CONTEXT, mx.float32, 256)
        before = caches[0].tokens_compressed
        memory.decode(model, caches)
        assert caches[0].tokens_compressed == before + 64
        assert caches[0].offset == 512 - memory.SHORT_OF_CONTEXT + memory.STEPS


@pytest.mark.usefixtures("tiny")
def test_a_cache_filled_but_not_flushed_holds_its_last_call_exact() -> None:
    model = llama.build(1, mx.float32)
    for flushed, exact in ((True, 0), (False, 128)):
        with llama.caches_of("GEAR 2-bit", model) as [cache]:
            llama.fill([cache], (2, 64), 512, mx.float32, 128, flushed=flushed)
            assert (cache.offset, cache.buffered_tokens) == (512, exact)


@pytest.mark.usefixtures("tiny")
def test_decode_has_speeds_bytes_and_the_peers_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PEER_MODULE", "no_such_peer")
    monkeypatch.setattr(decode, "STEPS", 2)
    rows = decode.run(Options(repeats=1, context=256, layers=2))
    check(rows)
    assert sorted(bars(rows)) == ["at least 10x faster", *["at least 2.5x faster"] * 2]
    for kind in llama.KINDS:
        row = named(rows, f"{kind}: a step of llama-3.2-1B shape, 2 layers at 256 tokens")
        assert row["tok_per_s"] == pytest.approx(1000 / row["median_ms"])
    fp16 = named(rows, "fp16")["mib"] * 2**20
    assert fp16 == 2 * 2 * (2 * 256 * 64) * 2  # layers, K and V, elements, bytes
    assert 0.1 * fp16 < named(rows, "GEAR 2-bit: a step")["mib"] * 2**20 < 0.4 * fp16
    missing = [row for row in rows if "not installed" in row["name"]]
    assert [row.keys() for row in missing] == [{"name", "bar"}] * 3


class _Peer:
    """Stands in for veloxquant-mlx: exact caches, one a layer."""

    KVCacheConfig = dict

    class KVCacheBuilder:
        @staticmethod
        def for_model(model: Any, config: dict[str, Any]) -> list[Any]:
            assert config["method"] == "gear"
            return [decode.KVCache() for _ in model.layers]


@pytest.mark.usefixtures("tiny")
def test_an_installed_peer_takes_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "find_spec", lambda name: name)
    monkeypatch.setattr(decode, "import_module", lambda _name: _Peer)
    monkeypatch.setattr(decode, "STEPS", 2)
    rows = decode.run(Options(repeats=1, context=256, layers=2))
    check(rows)
    measured = [row for row in rows if row["bar"]]
    steps = ("a step of", "an update of", "update and attention of")
    for bar, what in zip(measured, steps, strict=True):
        peer, ours = (named(rows, f"{kind}: {what}") for kind in (decode.PEER, decode.OURS))
        assert bar["ratio"] == pytest.approx(peer["median_ms"] / ours["median_ms"])


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("device", "judged"), [("cpu", []), ("gpu", ["at least 2.5x"])])
def test_batch_times_an_item(
    monkeypatch: pytest.MonkeyPatch, device: str, judged: list[str]
) -> None:
    on(monkeypatch, device)
    monkeypatch.setattr(batch, "STEPS", 2)
    rows = batch.run(Options(repeats=1, context=100, layers=1, dtype="float32"))
    check(rows)
    assert bars(rows) == judged
    one, eight = (named(rows, f"GEAR 2-bit: an item of 2 tokens behind 100, {b}")
                  for b in ("batch 1", "batch 8"))  # fmt: skip
    ratio = named(rows, "GEAR 2-bit: an item of batch 1 over")["ratio"]
    assert ratio == pytest.approx(one["median_ms"] / eight["median_ms"])
    assert eight["tok_per_s"] == pytest.approx(2000 / eight["median_ms"])


def test_the_sweep_asks_for_its_twelve_points() -> None:
    sizes = [*sweep.SIZES, "dataset.limit=1"]
    together = plan([*sweep.swept()[1:], *sizes], multirun=True).configs
    assert len(together) == len(sweep.points()) == 12
    for index in (0, 7, 11):
        assert plan([*sweep.points()[index], *sizes]).configs == [together[index]]
    assert {c.eval.protocol for c in together} == {"decode"}
    assert {(c.eval.prefill_tokens, c.eval.scored_tokens) for c in together} == {(1536, 512)}


@pytest.mark.parametrize("all_separate", [False, True])
def test_the_sweep_is_held_against_separate_runs_and_fp16(
    monkeypatch: pytest.MonkeyPatch, all_separate: bool
) -> None:
    asked: list[list[str]] = []

    def seconds(words: list[str]) -> float:
        asked.append(words)
        return 40.0 if "-m" in words else 5.0 if "cache=fp16" in words else 10.0

    monkeypatch.setattr(sweep, "seconds", seconds)
    rows = sweep._sweep(["eval=decode"], all_separate=all_separate)
    check(rows)
    assert len(asked) == 1 + (12 if all_separate else 3) + 1
    assert bars(rows) == ["at most 0.35x", "at most 6x"]
    assert [row["ratio"] for row in rows if row["bar"]] == [40 / 120, 8]
    assert [row["met"] for row in rows if row["bar"]] == [True, False]
    assert ("all timed" in rows[1]["name"]) == all_separate


def test_throughput_and_fixed_cost_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*sweep.TINY, "cache=fp16", "eval=oneshot"]
    rows = sweep._throughput(words, 1)
    check(rows)
    assert bars(rows) == ["at least 0.9x"]
    assert rows[-1]["ratio"] == pytest.approx(rows[0]["tok_per_s"] / rows[1]["tok_per_s"])
    assert "1 x 321 tokens" in rows[-1]["name"]  # P + T + 1
    monkeypatch.setattr(sweep, "GRID", {"gear.rank": (2, 4, 8)})
    monkeypatch.setattr(sweep, "seconds", lambda words: 1000.0 if "-m" in words else 2.0)
    rows = sweep._fixed_cost()
    check(rows)
    assert bars(rows) == ["at most 0.5 s"]
    assert rows[0]["median_ms"] == pytest.approx(1000 * 998 / 2)
    assert rows[2]["ratio"] == pytest.approx((rows[0]["median_ms"] - rows[1]["median_ms"]) / 1000)


def test_a_run_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"gear.rnak.*failed"):
        sweep.seconds(["gear.rnak=4"])


def test_a_bar_is_met_or_missed() -> None:
    assert timing.at_most("x", 3.0, 3)["met"]
    assert not timing.at_most("x", 3.1, 3)["met"]
    assert timing.at_least("x", 2.0, 2)["met"]
    assert not timing.at_least("x", 1.9, 2)["met"]
    assert timing.at_least("x", None, 2, "x") == {"name": "x", "bar": "at least 2x"}


def test_things_are_timed_in_turns() -> None:
    order: list[str] = []
    rows = timing.in_turns({n: lambda n=n: order.append(n) for n in "ab"}, repeats=2, calls=4)
    assert order == ["a", "b"] * 3  # one warm-up each
    assert list(rows) == ["a", "b"]
    assert all(row["iqr_ms"] >= 0 for row in rows.values())


def test_the_peak_is_counted_from_what_was_active() -> None:
    assert timing.peak_bytes(lambda: mx.eval(mx.zeros((1 << 20,)) + 1)) >= 4 << 20
    assert timing.peak_bytes(lambda: None) < 1 << 20


@pytest.mark.usefixtures("tiny")
def test_results_go_to_json_and_to_the_devices_section(tmp_path: Path) -> None:
    out, page = tmp_path / "rows.json", tmp_path / "BENCHMARKS.md"
    page.write_text("# Benchmarks\n\n## Another GPU\n\n### memory\n\nkept\n", encoding="utf-8")
    argv = ["compress", "--repeats", "1", "--out", str(out), "--markdown", str(page)]
    assert bench.main([*argv, "--commit", "abc123"]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["environment"]["commit"] == "abc123"
    assert {"device", "machine", "mlx", "mlx-lm", "blas"} <= found["environment"].keys()
    assert found["results"]["compress"][0]["name"] == "low rank, power"
    text = page.read_text(encoding="utf-8")
    device = found["environment"]["device"]
    assert text.index("## Another GPU\n\n### memory\n\nkept") < text.index(f"## {device}\n")
    assert "commit abc123" in text
    assert bench.main([*argv, "--commit", "def456"]) == 0
    again = page.read_text(encoding="utf-8")
    assert "abc123" not in again
    assert again.count("### compress") == 1
    assert "kept" in again


def test_a_page_is_made_where_there_is_none_and_keeps_other_benches() -> None:
    facts = {"device": "A", "commit": "1"}
    page = report.updated("", facts, {"memory": [{"name": "m", "mib": 1.0, "bar": ""}]})
    assert page.startswith("# Benchmarks\n")
    both = report.updated(page, facts, {"decode": [timing.at_most("d", 5, 2, "x")]})
    assert both.index("### decode") < both.index("### memory")
    assert "| d | 5.000 | at most 2x | NO |" in both
    assert report.updated(both, facts, {}) == both


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, ["attention", "compress", "decode", "memory", "sweep", "--markdown"]),
        (["attentions"], 2, ["invalid choice: 'attentions'", "attention"]),
        ([], 2, ["required: bench"]),
    ],
)
def test_the_command_line_says_what_there_is(
    arguments: list[str], code: int, said: list[str]
) -> None:
    command = [sys.executable, str(SCRIPTS / "bench.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == code
    assert all(text in done.stdout + done.stderr for text in said)


def test_every_name_is_a_bench() -> None:
    assert all(callable(import_module(f"benches.{name}").run) for name in bench.BENCHES)


def test_a_gpu_machine_needs_no_harness() -> None:
    absent = ("hydra", "omegaconf", "mlflow", "datasets", "pandas")
    modules = ", ".join(f"benches.{name}" for name in bench.BENCHES)
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import benches.report, {modules}; "
    code += f"print(*[m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == ""
