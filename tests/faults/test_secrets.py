"""What is secret in the environment is in no record, file, database, log, page or message."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from evals import cli
from evals.record import records

pytestmark = pytest.mark.fault

SECRETS = {
    "SECRET": "correct-horse-battery",
    "MLFLOW_TRACKING_USERNAME": "somebody-of-mine",
    "MLFLOW_TRACKING_PASSWORD": "staple-of-mine",
    "HF_TOKEN": "hf_thisisatokenofmine",
}
TINY = (
    "model=tiny", "dataset.limit=1", "eval.prefill_tokens=128", "eval.scored_tokens=64",
    "eval.bootstrap_samples=20",
)  # fmt: skip


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GEAR_MLRUNS", str(tmp_path / "runs"))
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "runs"


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run a command line; return the exit code, Hydra's own too."""
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    try:
        return cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)


def leaks(root: Path, said: str) -> list[str]:
    """Return where a secret stands: files below ``root``, their names, or what was printed."""
    files = [path for path in root.rglob("*") if path.is_file()]
    texts = {"printed": said.encode(), **{str(path): path.read_bytes() for path in files}}
    return [
        f"{name} in {place}"
        for place, text in texts.items()
        for name, value in SECRETS.items()
        if value.encode() in text or value in place
    ]


def test_a_whole_run_with_tracking_leaves_no_secret(
    root: Path, database: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root.mkdir()
    shutil.copy(database, root / "mlflow.db")
    assert call(monkeypatch, *TINY) == 0
    for words in (["--cfg", "all", "--resolve"], ["job.dry_run=true"], ["--info", "config"]):
        assert call(monkeypatch, *words, *TINY) == 0
    said = "".join(capfd.readouterr())
    assert len(list(records(root))) == 2
    names = {path.name for path in root.rglob("*") if path.is_file()}
    assert {"record.json", "log.txt", "report.html", "environment.json", "hydra.yaml"} <= names
    assert "dry_run: false" in said
    assert leaks(root, said) == []


ENV = "${oc.env:SECRET}"


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("dataset: {path: '%s'}", ENV),
        ("dataset: {path: '%s'}", "${oc.decode:${oc.env:SECRET}}"),
        ("dataset: {path: '%s'}", "a/${ oc.env:SECRET,x}"),
        ("dataset: {path: '%s'}", "${resolver_of_theirs:1}"),
        ("eval: {system_prompt: '%s'}", ENV),
        ("tracking: {experiment_name: '%s'}", ENV),
        ("hydra: {sweeper: {params: {dataset.path: 'a,%s'}}}", ENV),
        ("defaults: [override /model: '%s']", ENV),
        ("cache: {name: '%s'}", ENV),
    ],
)
def test_a_file_that_asks_for_a_secret_is_refused_before_it_is_read(
    root: Path,
    tmp_path: Path,
    place: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "own/experiment/own.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"# @package _global_\n{place % text}\n", encoding="utf-8")
    words = ["--config-dir", str(tmp_path / "own"), "experiment=own"]
    for mode in ([], ["--cfg", "job", "--resolve"], ["job.dry_run=true"]):
        assert call(monkeypatch, *mode, *words) == 2
    said = "".join(capfd.readouterr())
    assert said.count("own.yaml:2=") == 3
    assert "resolvers" in said
    assert leaks(tmp_path, said) == []
    assert not root.exists()


@pytest.mark.parametrize(
    "word",
    [
        "dataset.path=${oc.env:SECRET}",
        "eval.system_prompt=${oc.env:SECRET}",
        "hydra.run.dir=${oc.env:SECRET}",
        "hydra.job.env_copy=[SECRET]",
        "model=${oc.env:SECRET}",
    ],
)
def test_a_word_that_asks_for_a_secret_is_refused(
    root: Path, word: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for mode in ([], ["--cfg", "all", "--resolve"], ["--info", "config"], ["job.dry_run=true"]):
        assert call(monkeypatch, *mode, word) == 2
    assert leaks(root, "".join(capfd.readouterr())) == []
    assert not root.exists()
