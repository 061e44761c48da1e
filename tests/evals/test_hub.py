"""evals.hub: a cached snapshot needs no network; without one the next step is said."""

import pytest
from huggingface_hub import constants

from evals import hub
from evals.model_folder import ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache, offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.snapshot.cache_clear()
    yield tmp_path
    hub.snapshot.cache_clear()


def cached_model(cache, name: str):
    """Put a snapshot of owner/name into the cache, as a download would."""
    repo = cache / f"models--owner--{name}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    folder = repo / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def test_a_cached_snapshot_is_found_with_its_commit(hub_cache):
    folder = cached_model(hub_cache, "model")
    assert hub.snapshot("owner/model", None) == (folder, COMMIT)
    assert hub.snapshot("owner/model", COMMIT) == (folder, COMMIT)


def test_offline_the_command_to_run_is_given(hub_cache):
    with pytest.raises(ModelError) as error:
        hub.snapshot("owner/model", "v1")
    message = str(error.value)
    assert "HF_HUB_OFFLINE is set" in message
    assert "`hf download owner/model --revision v1`" in message
    assert "model=local model.path=FOLDER" in message


def test_any_failure_of_the_download_is_a_clear_error(hub_cache, monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("refused")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError, match=r"cannot be reached .*\(ConnectionError\)"):
        hub.snapshot("owner/model", None)


def test_only_data_files_are_asked_for(hub_cache, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda repo, **options: asked.update(options) or str(hub_cache / COMMIT),
    )
    hub.snapshot("owner/model", None)
    assert not any(p.endswith((".py", ".bin", ".pt")) or p == "*" for p in asked["allow_patterns"])


@pytest.mark.parametrize("repo", ["model", "a/b/c", "../secret", "https://x/y", "owner/na me", ""])
def test_an_id_is_owner_and_name(hub_cache, repo):
    with pytest.raises(ModelError, match="owner/name"):
        hub.snapshot(repo, None)
