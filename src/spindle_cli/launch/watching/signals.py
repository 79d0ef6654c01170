"""Signals to the launcher while a run goes on: SIGTERM asks the workers to save and end, Ctrl-C ends them.

Schedulers send SIGTERM some time before they kill. It reaches no worker through the launcher: a file asks
them, which they look for once a step.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from spindle_cli.errors import ExitCode
from spindle_cli.files.request import stop_path
from spindle_cli.process.lifetime import ends_at_once


@dataclass
class Signals:
    """What this process was asked so far. An exception raised in a handler can get lost in the code that it
    interrupts (an import, a callback from C), so the loop that waits for the run looks here.
    """

    stop: bool = False
    stop_now: bool = False
    interrupt: bool = False
    run_dir: Path | None = None

    def pass_on(self, run_dir: Path) -> None:
        """From now on what asks this process to stop asks the run's workers; also what has asked before."""
        self.run_dir = run_dir
        if self.stop:
            self.ask_workers()

    def ask_workers(self) -> None:
        """Ask the workers to stop, by a file that they look for."""
        if self.run_dir is not None:
            with contextlib.suppress(
                FileNotFoundError
            ):  # deleted while the run went on: whoever watches says so
                stop_path(self.run_dir).touch()

    def look(self) -> None:
        """What was asked for happens here.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
            SystemExit: SIGTERM has come twice.
        """
        if self.interrupt:
            raise KeyboardInterrupt
        if self.stop_now:
            raise SystemExit(ExitCode.STOPPED)


@contextmanager
def heeding_signals() -> Iterator[Signals]:
    """Inside the block SIGTERM asks the run's workers to stop, and a second one ends them at once; Ctrl-C is
    noted, for `Signals.look`.

    Python gives signals to the main thread alone; in another one nothing changes.
    """
    seen = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        seen.stop_now = seen.stop
        seen.stop = True
        seen.ask_workers()

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        seen.interrupt = True

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual or ends_at_once(signal.SIGINT):  # not where a parent wants it ignored
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
