"""Commands of a check, inside the time that is left for all of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent
ROOT = SCRIPTS.parent
# Less than this is not worth to begin with.
LEAST_S = 15.0


class NotReachedError(Exception):
    """No time is left for a command, or it did not end inside of what was left."""


class CommandFailedError(Exception):
    """A command ended with another exit code than 0; the end of what it said."""


@dataclass
class Commands:
    """Runs commands until the budget is spent. `run`: as `subprocess.run`; another one in tests."""

    budget_s: float
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
    clock: Callable[[], float] = time.monotonic
    begun_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun_s = self.clock()

    @property
    def spent_s(self) -> float:
        """Seconds since the begin."""
        return self.clock() - self.begun_s

    def spindle(self, *arguments: str | Path) -> str:
        """What a command of spindle printed on standard output."""
        return self.python("-m", "spindle_cli", *arguments)

    def python(self, *arguments: str | Path, folder: Path = ROOT) -> str:
        """The same of a program in Python.

        Raises:
            NotReachedError: there was no time.
            CommandFailedError: it failed.
        """
        left_s = self.budget_s - self.spent_s
        if left_s < LEAST_S:
            raise NotReachedError
        command = [sys.executable, *map(str, arguments)]
        try:
            ended = self.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=left_s)
        except subprocess.TimeoutExpired as error:
            raise NotReachedError from error
        if ended.returncode:
            raise CommandFailedError(_last_lines(ended.stdout, ended.stderr, ended.returncode))
        return ended.stdout


def _last_lines(out: str, err: str, code: int) -> str:
    lines: Sequence[str] = [line.strip() for line in (err or out).splitlines() if line.strip()]
    return f"exit code {code}: {' / '.join(lines[-2:])}"[:300]
