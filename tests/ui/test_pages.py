"""MLflow's own pages in a headless Chromium: what a person sees of a sweep and of a job.

``GEAR_SCREENSHOTS=FOLDER`` keeps a picture of every page.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from evals.schema import TrackingConfig
from evals.tracking import SweepView, log_sweep
from gear.config import GearConfig
from tests.evals.fake_records import commit, failed, sweep
from tests.evals.test_ui import free_port, script

pytestmark = [pytest.mark.ui, pytest.mark.xdist_group("ui")]

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PAGE_MS = 30_000
"""The most that one page may take: the first one loads five megabytes of script."""
JOBS = ("fp16", "gear (gear.rank=4)", "gear (gear.rank=8)", "gear (gear.rank=16)")
PARENT = "smoke · tiny · embedded · decode · 4 jobs"
FIRST_METRICS_ARE = """names => {
    const heads = [...document.querySelectorAll("[role=columnheader][col-id^='metrics.']")]
    heads.sort((a, b) => a.getBoundingClientRect().x - b.getBoundingClientRect().x)
    return names.every((name, i) => heads[i]?.getAttribute("col-id") === "metrics.`" + name + "`")
}"""
"""Tells, in the page, whether the metrics' columns begin with these, from left to right."""
RUNS = "/#/experiments/1/runs?workflowType=machine_learning"


@pytest.fixture(scope="module")
def chromium() -> str:
    """The installed browser; absent is a skip here and a failure in CI on Linux."""
    pytest.importorskip("playwright")
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        reason = f"none of {', '.join(PROGRAMS)} is installed (Debian: apt-get install chromium)"
        if os.environ.get("CI") == "true" and sys.platform == "linux":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def shown(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepView]:
    """A results root with one sweep in MLflow."""
    root = tmp_path_factory.mktemp("root")
    records = [*sweep(), failed(settings=GearConfig(rank=16))]
    for record in records:
        record["words"] = ["model=tiny", f"cache={record['config']['cache']['name']}"]
    view = log_sweep(
        root, commit(root, records), ["experiment=smoke", "-m"], TrackingConfig(name="mlflow")
    )
    return root, view


@pytest.fixture(scope="module")
def printed(shown: tuple[Path, SweepView]) -> Iterator[list[str]]:
    """What scripts/ui.py prints while it serves that root: pages, of a sweep and of columns."""
    command, environment = script(shown[0], "ui.py", "--port", str(free_port()))
    server = subprocess.Popen(  # noqa: S603
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        lines: list[str] = []
        for line in server.stdout:
            lines.append(line.strip())
            if line.startswith("view of sweeps: "):
                break
        yield lines
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)


@pytest.fixture(scope="module")
def page(chromium: str, printed: list[str]) -> Iterator[Any]:
    """A page that reaches the server and nothing else."""
    from playwright.sync_api import sync_playwright

    host = urlsplit(url(printed, "newest sweep")).netloc
    outside: list[str] = []

    def guard(route: Any) -> None:
        parts = urlsplit(route.request.url)
        if parts.netloc == host or parts.scheme in ("data", "blob"):
            route.continue_()
        else:
            outside.append(route.request.url)
            route.abort()

    with sync_playwright() as driver:
        # Chromium's sandbox refuses to run as root.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.set_default_timeout(PAGE_MS)
        page.route("**/*", guard)
        # MLflow's assistant would open itself and take a quarter of the first page.
        seen = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
        page.add_init_script(seen)
        yield page
        browser.close()
    assert outside == []


def url(printed: list[str], what: str) -> str:
    """Return the address that was printed behind ``what``."""
    (line,) = [line for line in printed if line.startswith(f"{what}: ")]
    return line.split()[len(what.split())]


def base(printed: list[str]) -> str:
    """Return the server's address."""
    return "http://" + urlsplit(url(printed, "newest sweep")).netloc


def visit(page: Any, address: str, *texts: str) -> None:
    """Open an address as a new page and wait for texts in it."""
    page.goto("about:blank")
    page.goto(address)
    for text in texts:
        page.get_by_text(text).first.wait_for()


def picture(page: Any, name: str) -> None:
    """Keep a picture of the page where a folder for them is named."""
    if folder := os.environ.get("GEAR_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_the_experiment_lists_the_sweep_and_its_jobs(page: Any, printed: list[str]) -> None:
    visit(page, url(printed, "view of sweeps"), PARENT)
    assert page.get_by_text(JOBS[1]).count() == 0
    page.locator("[role=gridcell]", has_text=PARENT).get_by_role("button").first.click()
    for job in JOBS:
        page.get_by_role("link", name=job, exact=True).wait_for()
    page.wait_for_function(FIRST_METRICS_ARE, arg=["kv/size_pct"])
    assert "…" not in page.get_by_role("link", name=PARENT).inner_text()
    picture(page, "experiment")


def test_the_saved_view_compares_jobs_in_columns_of_numbers(page: Any, printed: list[str]) -> None:
    visit(page, url(printed, "view of perplexity"), *JOBS, "kv/size_pct", "fidelity/delta_nll")
    # The page puts columns in their order after it has drawn them.
    page.wait_for_function(FIRST_METRICS_ARE, arg=["kv/size_pct", "quality/ppl_token/decode"])
    assert page.get_by_text(PARENT).count() == 0
    sizes = page.locator("[role=gridcell][col-id='metrics.`kv/size_pct`']").all_inner_texts()
    assert [text.strip() for text in sizes] == ["13.75", "16.875", "100", "-"]
    picture(page, "columns")


def test_the_sweeps_page_shows_its_table(page: Any, printed: list[str]) -> None:
    visit(page, url(printed, "newest sweep"), PARENT, "python run.py experiment=smoke -m")
    page.get_by_text("Show more").first.click()
    table = page.locator("table", has_text="KV size %").first
    rows = [row.split("\t")[0].strip() for row in table.locator("tr").all_inner_texts()]
    assert rows == ["method", *JOBS]
    assert "WorkerDied (SIGSEGV)" in page.locator("li", has_text="gear.rank=16").first.inner_text()
    picture(page, "sweep")


def test_the_sweeps_report_opens(page: Any, printed: list[str], shown: Any) -> None:
    visit(page, artifact(printed, shown[1].parent_run_id, "report.html"), "pareto.pdf")
    frame = page.frame_locator("iframe")
    frame.get_by_role("heading", name="smoke", exact=False).first.wait_for()
    frame.get_by_text("gear (gear.rank=8)").first.wait_for()
    picture(page, "report")


def artifact(printed: list[str], run: str, name: str) -> str:
    """Return the address of a file's page."""
    path, _, query = RUNS.partition("?")
    return f"{base(printed)}{path}/{run}/artifacts/{name}?{query}"


def test_a_jobs_page_shows_its_metrics_and_command(
    page: Any, printed: list[str], shown: Any
) -> None:
    path, _, query = RUNS.partition("?")
    run = shown[1].run_ids[sweep()[2]["key"]]
    visit(page, f"{base(printed)}{path}/{run}?{query}", JOBS[2], "kv/stored_bytes")
    row = page.locator("[role=row]", has_text="kv/size_pct").first
    assert row.inner_text().split() == ["kv/size_pct", "16.875"]
    page.get_by_text("python run.py model=tiny cache=gear").first.wait_for()
    page.get_by_role("link", name=PARENT).first.wait_for()
    picture(page, "job")


def test_a_jobs_samples_and_layers_are_tables(page: Any, printed: list[str], shown: Any) -> None:
    run = shown[1].run_ids[sweep()[2]["key"]]
    names = ("config.yaml", "record.json", "samples.jsonl", "layers.png", "View as table")
    for table, head, cell in (
        ("samples.json", "nll", "1.5"),
        ("layers.json", "fp16_bytes", "1000000"),
    ):
        visit(page, artifact(printed, run, table), *names)
        page.get_by_text(head, exact=True).first.wait_for()
        page.get_by_text(cell, exact=True).first.wait_for()
        picture(page, f"job_{Path(table).stem}")
