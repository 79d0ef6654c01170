"""The death of a process that loads batches, as an error, and which one an error comes of that looks
otherwise where it is raised.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection
from multiprocessing.process import BaseProcess

from spindle_cli.errors import RunFailedError, SpindleError, WorkerLostError

_DIES_WITHIN_S = 2.0  # after its connections are closed


def cause_of(task: str, error: BaseException, workers: Collection[BaseProcess]) -> BaseException:
    """The death of a worker, if there is one that the error comes of; else the error.

    Workers read a dataset and tell what it raises: another error where their items are taken is torch's own
    or that of a connection, which is closed a little before its process has ended.
    """
    if not workers or isinstance(error, SpindleError) or not isinstance(error, Exception):
        return error
    until = time.monotonic() + _DIES_WITHIN_S
    while (dead := _dead(workers)) is None and time.monotonic() < until:
        time.sleep(0.01)
    if dead is None:
        return error
    return death_of(
        f"task {task!r}: its loader worker (process {dead.pid})",
        dead.exitcode or 0,
        "fewer `workers` or a smaller `prefetch` in `train: {loader: ...}` take less",
    )


def leave_workers_unwatched() -> None:
    """From now on a dead worker raises nothing: torch's handler of the signal raises wherever the main thread
    is, so inside the handling of another error, too.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _dead(workers: Collection[BaseProcess]) -> BaseProcess | None:
    return next((worker for worker in workers if worker.exitcode), None)


def death_of(who: str, code: int, takes_less: str) -> SpindleError:
    """The error of a process that has ended.

    Args:
        who: with its task, for people.
        code: its exit code; below 0, of the signal that killed it, which may be for lack of memory.
        takes_less: what of the settings would take less memory.
    """
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended (exit code {code})"
    kind = WorkerLostError if code < 0 else RunFailedError
    return kind(
        f"{who} {how}",
        hint=f"Killed from outside is usually for lack of memory: {takes_less}. "
        "Go on from the last checkpoint with --resume.",
    )
