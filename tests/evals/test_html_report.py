"""The HTML report: its parts, that it stands alone and repeats, that no text becomes markup."""

from __future__ import annotations

from base64 import b64decode
from html.parser import HTMLParser
from typing import Any

from evals import plots
from evals.drawing import numbers
from evals.experiments import Experiment
from evals.html_report import html
from tests.evals.fake_records import Record, failed, finished, sweep
from tests.evals.fake_samples import HOSTILE, error_samples, kl_samples, none, reconstruction

SMOKE = Experiment(
    "smoke", "does it?", "python run.py experiment=smoke", "3 min", "0.1", "if not <"
)
ARGV = ["experiment=smoke", "gear.rank=4,8", "-m"]
VOID = {"meta", "img", "br"}


class _Page(HTMLParser):
    """What a browser finds: tags with attributes, texts by heading; wrong nesting is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, list[str]] = {}
        self.headings: list[str] = ["(head)"]
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)
        elif data.strip():
            self.sections.setdefault(self.headings[-1], []).append(data.strip())

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]

    def text(self, heading: str) -> str:
        return " ".join(self.sections[heading])


def _page(records: list[Record], samples: Any = none, **given: Any) -> _Page:
    return _Page(html(records, samples, given.get("argv", ARGV), given.get("experiment", SMOKE)))


def test_it_has_every_part_in_order() -> None:
    page = _page([*sweep(), failed("kivi")])
    assert page.headings[1:] == [
        "Question", "Command", "Results", "Figures", "Failures", "By layer", "Guards",
        "Where it was measured", "How to reproduce",
    ]  # fmt: skip
    assert page.sections["Question"] == [
        "Question", "does it?", "Decision rule", "if not <", "Expected", "0.1", "Takes", "3 min",
    ]  # fmt: skip
    assert page.sections["Command"] == ["python run.py experiment=smoke gear.rank=4,8 -m"]
    assert page.sections["(head)"][0] == "smoke · tiny · embedded · decode · 4 jobs"


def test_the_table_has_the_intervals_and_every_job() -> None:
    page = _page([*sweep(), failed("kivi")])
    shown = page.text("Results")
    for cell in ("gear (gear.rank=8)", "+0.0625 [+0.0525, +0.0750]", "kivi", "FAILED"):
        assert cell in shown
    assert {"class": "failed"} in page.named("td")


def test_what_failed_says_why() -> None:
    page = _page([*sweep(), failed("kivi")])
    assert page.sections["Failures"][0] == "kivi"
    shown = page.text("Failures")
    assert "WorkerDied (SIGSEGV): the worker died: exit status -11" in shown
    assert "Fatal Python error" in shown
    assert "Failures" not in _page(sweep()).headings


def test_figures_and_their_numbers_are_in_the_file() -> None:
    records = sweep()
    page = _page(records, lambda _: kl_samples(("a", [0.25, 0.5])))
    names = [figure["id"] for figure in page.named("figure")]
    drawn = plots.of_sweep(records, lambda _: kl_samples(("a", [0.25, 0.5])))
    assert names == list(drawn) == ["pareto", "rank", "bytes_by_term", "kl_by_position"]
    for image, link, drawing in zip(
        page.named("img"), page.named("a"), drawn.values(), strict=True
    ):
        start, picture = (image["src"] or "").split(",")
        assert start == "data:image/png;base64"
        assert b64decode(picture).startswith(b"\x89PNG")
        data = b64decode((link["href"] or "").partition(",")[2])
        assert data.decode() == numbers(drawing)


def test_figures_that_are_drawn_already_are_taken() -> None:
    drawn = plots.of_sweep(sweep(), none)
    text = html(sweep(), none, ARGV, SMOKE, {"rank": drawn["rank"]})
    assert [figure["id"] for figure in _Page(text).named("figure")] == ["rank"]


def test_each_job_has_its_layers() -> None:
    record = reconstruction()
    page = _page([record], lambda _: error_samples({0: ([0.1, 0.3], [0.5, 0.7])}))
    assert page.sections["By layer"] == [
        f"gear ({record['key'][:8]})",
        "layer", "stored bytes", "fp16 bytes", "K error", "V error",
        "0", "200,000", "1,000,000", "0.2000", "0.6000",
        "1", "200,000", "1,000,000", "-", "-",
    ]  # fmt: skip


def test_it_needs_no_network_and_runs_no_script() -> None:
    page = _page([*sweep(), failed("kivi")])
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "iframe", "object", "form", "base", "svg"}
    sources = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href")]
    assert sources
    assert all((source or "").startswith("data:") for source in sources)
    assert not [k for _, attrs in page.tags for k in attrs if k.startswith("on")]
    (policy,) = [m for m in page.named("meta") if m.get("http-equiv")]
    assert (policy["content"] or "").startswith("default-src 'none'")


def test_no_text_becomes_markup() -> None:
    record = {**failed("gear", model={"name": HOSTILE}), "words": [HOSTILE]}
    record["error"] = {**record["error"], "message": HOSTILE, "log_tail": HOSTILE + "\ud800"}
    record["guards"] = {HOSTILE: HOSTILE}
    record["environment"] = {"python": HOSTILE, "git": {"commit": HOSTILE, "dirty": True}}
    good = finished(HOSTILE, dataset={"name": HOSTILE})
    question = Experiment(*[HOSTILE] * 6)
    text = html([good, record], none, [HOSTILE], question)
    page = _Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script" not in text
    assert len(page.named("img")) == len(page.named("figure")) == 2
    for heading in ("Question", "Command", "Results", "Failures", "Guards", "How to reproduce"):
        assert "<script>alert(" in page.text(heading)
    text.encode("utf-8")


def test_equal_records_give_the_same_bytes_whatever_run_they_are() -> None:
    def samples(_: str) -> list[Record]:
        return kl_samples(("a", [0.25, 0.5]))

    first = html(sweep(), samples, ARGV, SMOKE)
    tracked = [{**record, "mlflow_run_id": "f" * 32} for record in sweep()]
    assert html(tracked, samples, ARGV, SMOKE) == first


def test_records_of_no_sweep_have_a_report_too() -> None:
    page = _page([failed()], argv=None, experiment=None)
    assert page.headings[1:] == [
        "Command", "Results", "Failures", "Where it was measured", "How to reproduce",
    ]  # fmt: skip
    assert "Not known" in page.text("Command")
    assert page.sections["(head)"][0] == "tiny · embedded · decode · 1 job"
