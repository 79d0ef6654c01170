"""A progress bar for people, on standard error and only on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Steps(Protocol):
    """Counts steps that are done."""

    def start(self, label: str) -> None:
        """Say what is being done now."""

    def done(self) -> None:
        """Tell that one step is done."""


class _Silent:
    def start(self, label: str) -> None:
        """Do nothing: nobody watches."""

    def done(self) -> None:
        """Nobody watches."""


class _Bar:
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)

    def start(self, label: str) -> None:
        self._progress.update(self._task, description=label)

    def done(self) -> None:
        self._progress.advance(self._task)


@contextmanager
def steps_bar(total: int, console: Console) -> Iterator[Steps]:
    """A bar of `total` steps with what is being done and the time left; nothing but on a terminal."""
    if not console.is_terminal or total == 0:
        yield _Silent()
        return
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, total)
