"""What a person sees while jobs run: one bar a job on stderr, and no bar where no terminal is."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class JobBar:
    """The bar of one running job: windows or items done, how many a second, time left.

    Call it with the worker's events; warnings are printed on any console, the rest on terminals.
    """

    def __init__(self, title: str, console: Console) -> None:
        self._console = console
        self._done_before: int | None = None
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=None, rate="loading")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event of the worker."""
        if event["event"] == "progress":
            elapsed_s = self._progress.tasks[self._task].elapsed
            if self._done_before is None:  # what a killed run had done took no time now
                self._done_before = event["done"] - 1
            rate, done = "", event["done"] - self._done_before
            if elapsed_s:
                rate = f"{done / elapsed_s:.2g}/s, {event['tokens'] / elapsed_s:.0f} tok/s"
            self._progress.update(
                self._task, completed=event["done"], total=event["total"], rate=rate
            )
        elif event["level"] == "warning" or self._console.is_terminal:
            self._console.print(event["text"], markup=False, highlight=False, soft_wrap=True)
