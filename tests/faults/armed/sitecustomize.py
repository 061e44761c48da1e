"""Make a fault in a real worker that has this folder on PYTHONPATH: ``FAULT_AT``, ``FAULT_KIND``.

``FAULT_FOLDER`` is where its write steps are counted (tests/faults/steps.py); their names are
appended to ``FAULT_NOTES``. A sample's line is a step too, of which a half gets to the file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from evals.record import SampleWriter
from tests.faults.steps import SPACE, Steps, arm


class Noted(Steps):
    """Steps whose names are on disk before they happen, since a worker leaves by ``_exit``."""

    def note(self, name: str, grows: bool = True) -> bool:
        with open(os.environ["FAULT_NOTES"], "a", encoding="utf-8") as notes:
            notes.write(name + "\n")
        return super().note(name, grows)


def cut_samples(steps: Steps) -> None:
    """Make each sample a step."""
    whole = SampleWriter.write

    def write(self: SampleWriter, sample: dict[str, Any]) -> None:
        if steps.next_is_faulty:
            line = json.dumps(sample)
            self._file.write(line[: len(line) // 2])
            self._file.flush()
        if steps.note("sample"):
            raise OSError(28, SPACE)
        whole(self, sample)

    SampleWriter.write = write


if "evals.worker" in sys.orig_argv and "FAULT_AT" in os.environ:
    given = os.environ
    cut_samples(
        arm(Noted(Path(given["FAULT_FOLDER"]), int(given["FAULT_AT"]), given["FAULT_KIND"]))
    )
