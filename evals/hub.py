"""Find, or download once, the files of a Hugging Face model. No MLX, no remote code.

Only safetensors, JSON and tokenizer files are ever fetched. ``HF_HUB_OFFLINE=1`` and the other
variables of ``huggingface_hub`` are honoured; a snapshot that is in its cache needs no network.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from evals.model_folder import ModelError

PATTERNS = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.tiktoken",
    "tiktoken.model",
    "chat_template.jinja",
]
_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def _advice(repo: str, revision: str | None) -> str:
    """Return the next step for a model that cannot be had."""
    pinned = f" --revision {revision}" if revision else ""
    return (
        f"Next: run `hf download {repo}{pinned}` while there is a network, or get a folder with"
        f" `hf download {repo}{pinned} --local-dir FOLDER` elsewhere, copy it here and use"
        " model=local model.path=FOLDER."
    )


@cache
def snapshot(repo: str, revision: str | None) -> tuple[Path, str]:
    """Return (folder, commit) of a hub model, downloading what is missing.

    Resolved once per process: every job of a sweep sees the same commit. Raises
    :class:`ModelError` for a malformed or unknown id, and when offline or unreachable.
    """
    if not _ID.fullmatch(repo):
        raise ModelError(f"model.repo={repo!r}: must be a Hugging Face id, as owner/name.")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"model.repo={repo!r} (revision {revision or 'main'})"
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=PATTERNS))
    except GatedRepoError as error:
        raise ModelError(
            f"{where}: its owner asks for consent. Next: accept the terms on its page and run"
            " `hf auth login`, or use model=local model.path=FOLDER."
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelError(
            f"{where}: no such model, or a private one. Next: check id and revision;"
            " for a private model run `hf auth login`."
        ) from error
    except Exception as error:  # its own errors, the HTTP library's, and the disk's
        why = f"the hub cannot be reached or the download failed ({type(error).__name__})"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        raise ModelError(
            f"{where}: not (completely) in the local cache, and {why}. {_advice(repo, revision)}"
        ) from error
    return folder, folder.name
