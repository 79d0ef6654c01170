"""SIGTERM to the launcher: the workers save a checkpoint after the step that they are at, and end.

Schedulers send it some time before they kill. The signal itself reaches no worker: a file asks them, which
they look for once a step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from spindle_cli.errors import ExitCode
from spindle_cli.request import stop_path


@contextmanager
def stop_on_sigterm(run_dir: Path) -> Iterator[None]:
    """Inside the block SIGTERM asks the run's workers to stop; a second one ends them at once.

    Python gives signals to the main thread alone; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(_number: int, _frame: FrameType | None) -> None:
        if stop_path(run_dir).exists():
            raise SystemExit(ExitCode.STOPPED)
        stop_path(run_dir).touch()

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
