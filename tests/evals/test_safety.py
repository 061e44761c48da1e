"""Nothing outside the allow-list survives, whichever file or word it comes from."""

from pathlib import Path

import pytest

from evals.compose import plan
from evals.names import ConfigError
from evals.safety import TARGETS, UnsafeConfigError, check_file
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


@pytest.mark.parametrize(
    ("package", "text", "answer"),
    [
        ("gear", "bits: 2\nbits: 4\n", r"own.yaml:2: the key 'bits' stands twice"),
        ("gear", "by_layer:\n  3: {}\n  3: {}\n", r"own.yaml:3: the key '3' stands twice"),
        ("gear", "bits: '4'\n", r"own.yaml: gear.bits='4': must be an integer"),
        ("gear", "clip: 'false'\n", "must be true or false"),
        ("gear", "rnak: 4\n", r"own.yaml: gear.rnak: .* Did you mean gear.rank"),
        ("gear", "k: {bit: 4}\n", "Did you mean bits"),
        ("_global_", "gear:\n  rank: 4.5\n", "gear.rank=4.5"),
        ("_global_", "sede: 1\n", "Did you mean seed"),
        ("experiment", "gear:\n  rank: 4\n", "@package _global_"),
    ],
)
def test_a_file_is_checked_as_it_is_written(
    tmp_path: Path, package: str, text: str, answer: str
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=answer):
        check_file(path, package)


def test_an_ordinary_file_passes(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("defaults:\n  - x\ngear:\n  rank: null\nhydra:\n  mode: MULTIRUN\n", "utf-8")
    check_file(path, "_global_")
    path.write_text("# nothing\n", encoding="utf-8")
    check_file(path, "gear")
