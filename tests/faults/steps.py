"""Count the steps in which a process writes below a folder; at step n end it, or let no more fit.

A step is noted before it is done: a folder made, a file opened for writing, its content written,
an fsync, a rename, a removal, a commit to a database. To die before step n + 1 is to
die behind step n, so dying before each step is dying before and behind each. :func:`arm` is for a
process of its own: what it puts in place stays.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sqlite3
import sqlite3.dbapi2
import stat
import sys
from pathlib import Path
from typing import Any

KILL, FULL = "kill", "full"
"""Faults: the process is gone at step n; the disk has no more room from step n on."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
NAMED = {"os.mkdir": "make", "os.rename": "rename", "os.remove": "remove"}
SPACE = "No space left on device"


class Steps:
    """The steps below ``folder``, by name; ``fault`` happens at step ``at``, at none for 0."""

    def __init__(self, folder: Path, at: int = 0, fault: str = KILL) -> None:
        self.folder, self.at, self.fault = str(folder), at, fault
        self.names: list[str] = []

    @property
    def next_is_faulty(self) -> bool:
        """Whether the next step is the one, or one behind it on a full disk."""
        return 0 < self.at <= len(self.names) + 1

    def note(self, name: str, grows: bool = True) -> bool:
        """Note a step before it is done; return whether there is no room for it."""
        faulty = self.next_is_faulty
        self.names.append(name)
        if faulty and self.fault == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        return faulty and grows

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Note what Python says it is about to do (PEP 578)."""
        if event != "open" and event not in NAMED:
            return
        path = os.fsdecode(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else ""
        if not path.startswith(self.folder) or os.path.isdir(path):
            return
        there = os.path.exists(path)
        if event == "open":
            full = args[2] & WRITING and self.note(f"open {_name(path)}", grows=not there)
        else:  # a removal of what is not there is no step
            making = event == "os.mkdir"
            full = (making or there) and self.note(f"{NAMED[event]} {_name(path)}", grows=making)
        if full:
            raise OSError(errno.ENOSPC, SPACE, path)

    def synced(self, descriptor: int) -> None:
        """Stand in for os.fsync: first the content, of which a half gets there, then the sync."""
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if is_file and self.next_is_faulty:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        if is_file and self.note("write"):
            raise OSError(errno.ENOSPC, SPACE)
        self.note("fsync", grows=False)
        _fsync(descriptor)


_fsync, _connect = os.fsync, sqlite3.connect


def _name(path: str) -> str:
    """Return a path's last part without what is another in each run."""
    return re.sub(r"\.\d+$|\.?[0-9a-f]{32,}", "*", os.path.basename(path))


def arm(steps: Steps) -> Steps:
    """Note this process's steps from here on."""

    class Connection(sqlite3.Connection):
        """A connection whose commits are steps, however they are asked for."""

        def commit(self) -> None:
            if self.in_transaction and steps.note("commit"):
                raise sqlite3.OperationalError("database or disk is full")
            super().commit()

        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:  # pyright: ignore
            if sql == "COMMIT" and steps.note("commit"):
                raise sqlite3.OperationalError("database or disk is full")
            return super().execute(sql, *parameters)

    def connect(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        made = _connect(*args, **{"factory": Connection, **kwargs})
        sqlite3.Connection.execute(made, "PRAGMA synchronous = OFF")  # nobody pulls the plug here
        return made

    os.fsync = steps.synced
    sqlite3.connect = sqlite3.dbapi2.connect = connect  # pyright: ignore
    sys.addaudithook(steps.audit)
    return steps
