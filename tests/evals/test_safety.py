"""Nothing outside the allow-list survives, whichever file or word it comes from."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from evals.compose import plan
from evals.names import ConfigError
from evals.safety import TARGETS, UnsafeConfigError, check
from gear.methods import METHODS

EVIL = "{_target_: os.system, command: 'exit 3'}"
LOGGING = "{version: 1, root: {handlers: [h]}, handlers: {h: %s}}"


def test_the_targets_are_the_methods_and_hydras_own_launchers() -> None:
    assert set(TARGETS["cache"]) == set(METHODS.values())
    assert all(
        t.startswith(("hydra._internal.", "hydra_plugins.hydra_"))
        for t in TARGETS["hydra.launcher"]
    )
    assert len(TARGETS["hydra.sweeper"]) == 1


@pytest.mark.fault
@pytest.mark.parametrize(
    "word",
    [
        f"+hydra.callbacks={{mine: {EVIL}}}",
        "+hydra.callbacks={mine: {x: 1}}",
        "hydra.launcher._target_=os.system",
        "hydra.launcher=${gear}",
        f"+hydra.launcher.nested={EVIL}",
        "+hydra.launcher.nested=${cache}",
        "hydra.sweeper._target_=hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        f"++hydra.job_logging={LOGGING % '{class: subprocess.Popen}'}",
        f"++hydra.job_logging={LOGGING % '{class: logging.StreamHandler, stream: ext://os.system}'}",
        "++hydra.hydra_logging=${gear}",
        "hydra.job.env_copy=[SECRET]",
        "+hydra.job.env_set={LD_PRELOAD: x.so}",
        "dataset.path=${oc.env:SECRET}",
        "dataset.path=a/${oc.decode:x}",
        "hydra.run.dir=${oc.env:SECRET}",
    ],
)
def test_a_word_that_names_something_else_is_refused(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    with pytest.raises(UnsafeConfigError) as refused:
        plan([word])
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("uri", "answer"),
    [
        ("mlruns", r"must be sqlite:///path/mlflow\.db, http"),
        ("http://me:secret@host", r"http://…: must hold no user name, password"),
        ("https://host/?token=secret", r"https://…: must hold no user name, password or query"),
    ],
)
def test_a_tracking_uri_is_refused_in_words_and_files(
    tmp_path: Path, uri: str, answer: str
) -> None:
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking/own.yaml").write_text(f"name: own\nuri: {uri}\n", encoding="utf-8")
    folder = f'hydra.searchpath=["file://{tmp_path}"]'
    for words in ([f"tracking.uri='{uri}'"], [f"+tracking.uri='{uri}'"]):
        with pytest.raises(ConfigError, match=answer) as refused:
            plan(words)
        assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"tracking\.uri") as refused:
        plan([folder, "tracking=own"])
    assert "secret" not in str(refused.value)
    cfg = plan([]).jobs[0].cfg.copy()  # as a file of conf/ may set it
    OmegaConf.set_readonly(cfg, False)
    cfg.tracking.uri = uri
    with pytest.raises(ConfigError, match=answer):
        check(cfg)


def test_a_resolver_in_a_swept_value_is_refused() -> None:
    with pytest.raises(UnsafeConfigError, match="only"):
        plan(["dataset.path=a,${oc.env:SECRET}"], multirun=True)


@pytest.mark.parametrize("node", ["job_logging", "hydra_logging"])
def test_a_logging_factory_in_yaml_is_refused(tmp_path: Path, node: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/own.yaml").write_text(
        f"# @package _global_\nhydra:\n  {node}:\n    root: {{handlers: [h]}}\n"
        "    handlers: {h: {'()': os.system, command: exit 3}}\n",
        encoding="utf-8",
    )
    with pytest.raises(UnsafeConfigError, match="factories"):
        plan([f'hydra.searchpath=["file://{tmp_path}"]', "experiment=own"])


@pytest.mark.parametrize("logging", ["default", "stdout", "none", "disabled"])
def test_hydras_own_logging_is_allowed(logging: str) -> None:
    plan([f"hydra/job_logging={logging}"])


CACHE = "name: own\nsettings: ${gear}\n"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (CACHE + "_target_: os.system\n", r"cache\._target_='os.system': must be one of"),
        (CACHE + "_target_: gear.methods.kivi.load\n", "must be one of"),
        (CACHE + "_target_: ${eval.name}\n", "must be one of"),
        (CACHE, "must hold a _target_"),
        (CACHE + f"_target_: gear.methods.kivi.Kivi\nx: {EVIL}\n", r"cache\.x\._target_"),
        (CACHE + f"_target_: gear.methods.kivi.Kivi\nx: [{EVIL}]\n", r"cache\.x\.0\._target_"),
        (CACHE + "a: &t gear.methods.kivi.Kivi\n_target_: *t\n", "aliases"),
        ("a: &e\n  _target_: os.system\n<<: *e\nname: own\n", "aliases"),
        (CACHE + "_target_: gear.methods.kivi.Kivi\nname: again\n", "name"),
        (CACHE + "_target_: gear.methods.kivi.Kivi\nx: '${${a}.env:SECRET}'\n", "only"),
        (CACHE + "_target_: gear.methods.kivi.Kivi\nx: '${oc.env:SECRET}'\n", "only"),
        ("name: [own\n", "own.yaml"),
    ],
)
def test_a_yaml_file_that_names_something_else_is_refused(
    tmp_path: Path, text: str, answer: str
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/own.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=answer):
        plan([f'hydra.searchpath=["file://{tmp_path}"]', "cache=own"])
