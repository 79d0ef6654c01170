"""How a worker is asked to save a checkpoint and end: by the launcher's file, or by SIGTERM to itself.

Schedulers send SIGTERM to every process of a job. A worker notes it, and says so in the next sum of the
losses, so that all ranks stop after the same step.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

from spindle_cli.files.request import stop_path


class StopRequest:
    """Whether this worker was asked to stop."""

    def __init__(self, run_dir: Path) -> None:
        self._path = stop_path(run_dir)
        self._process = os.getpid()
        self._signalled = False

    def heed_sigterm(self) -> None:
        """From now on SIGTERM asks this process to stop, instead of ending it; in its main thread."""
        signal.signal(signal.SIGTERM, self._note)

    def is_requested(self) -> bool:
        """Whether a signal or the launcher's file has asked the worker to stop."""
        return self._signalled or self._path.exists()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._signalled = True
        else:  # a process that a dataset has forked: what ends others ends it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
