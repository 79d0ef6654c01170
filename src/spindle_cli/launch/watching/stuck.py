"""Workers that hang: which of them does not move, and where in its code it is.

A worker that hangs says nothing by itself: it is the others that give it up, after the run's timeout. Every
worker writes where its main thread is when it gets SIGUSR1 (`worker_session`), even one that is stuck in
native code; those that wait for another worker are told apart by what they are in.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from spindle_cli.files.request import journal_path, pid_path, stack_path, workers_dir
from spindle_cli.files.run_files import Journal

# For the stacks to be written; a worker that does not run at all writes none.
ANSWER_S = 1.0
BETWEEN_S = 0.3
_POLL_S = 0.02
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_OURS = str(Path(__file__).parents[2])
_LIBRARIES = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
# Where a worker waits for others: torch's collectives and messages, and where their results are taken.
_WAITS = (
    ("torch/distributed/", ""),
    ("runtime/communication/transfers.py", "wait_for"),
    ("runtime/measuring/timing.py", "await_mark"),
    ("runtime/update/gradient_check.py", "check"),
)


@dataclass(frozen=True)
class StuckWorker:
    """A worker that did not move, and waited for no other. `place`: 'file:line in function', for people.

    `doing`: 'step 3, in the forward pass of slice a/b[0:2]', from its journal; None: in no step.
    """

    rank: int
    place: str
    doing: str | None = None

    def __str__(self) -> str:
        return self.place if self.doing is None else f"{self.place} ({self.doing})"


@dataclass(frozen=True)
class _Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def find_stuck(run_dir: Path) -> tuple[StuckWorker, ...]:
    """The workers of this machine that run, wait for no other worker, and have stayed where they are.

    It looks twice, so that a worker that moves is not accused.
    """
    living = _living(run_dir)
    before = _places(run_dir, living)
    time.sleep(BETWEEN_S)
    after = _places(run_dir, living)
    return tuple(
        StuckWorker(rank, place, doing(run_dir, rank))
        for rank, place in after.items()
        if before.get(rank) == place
    )


def doing(run_dir: Path, rank: int) -> str | None:
    """What a worker is doing, or was when it ended, by its journal; None: nothing of a step."""
    journal = Journal.read(journal_path(run_dir, rank))
    return None if journal is None else journal.place()


def doing_of_all(run_dir: Path) -> dict[int, str]:
    """What every worker of this machine was doing, by rank; workers that were at nothing are left out."""
    pattern = journal_path(run_dir, 0).name.replace("00000", "*")
    ranks = sorted(int(path.stem.split("-")[1]) for path in workers_dir(run_dir).glob(pattern))
    activities = {rank: doing(run_dir, rank) for rank in ranks}
    return {rank: what for rank, what in activities.items() if what is not None}


def _living(run_dir: Path) -> dict[int, psutil.Process]:
    """Processes of this machine's workers, by rank."""
    processes: dict[int, psutil.Process] = {}
    for path in sorted(workers_dir(run_dir).glob(pid_path(run_dir, 0).name.replace("00000", "*"))):
        with contextlib.suppress(psutil.Error, ValueError):
            rank, started_s = int(path.stem.split("-")[1]), path.stat().st_mtime
            process = psutil.Process(int(path.read_text()))
            if process.create_time() <= started_s + 1 and process.status() != psutil.STATUS_ZOMBIE:
                processes[rank] = process
    return processes


def _places(run_dir: Path, workers: dict[int, psutil.Process]) -> dict[int, str]:
    """Where each worker is, but for those that wait for another."""
    for rank, process in workers.items():
        stack_path(run_dir, rank).write_bytes(b"")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGUSR1)
    give_up_at = time.monotonic() + ANSWER_S
    places: dict[int, str] = {}
    for rank, process in workers.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                places[rank] = "the process is stopped (SIGSTOP), it does not run"
            elif (place := place_of(_answer(stack_path(run_dir, rank), give_up_at))) is not None:
                places[rank] = place
    return places


def _answer(path: Path, give_up_at: float) -> str:
    """A worker's stack, once it is there and no more is added."""
    text = before = ""
    while time.monotonic() < give_up_at:
        before, text = text, path.read_text(encoding="utf-8", errors="replace")
        if text and text == before:
            break
        time.sleep(_POLL_S)
    return text


def place_of(stack: str) -> str | None:
    """Where a worker is, from what faulthandler writes; None where it waits for another, or tells nothing.

    The place is that of the innermost frame in the user's own code, else in this package.
    """
    current = stack.rpartition("Current thread")[2]
    frames = [
        _Frame(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(current)
    ]
    if not frames or any(_waits(frame) for frame in frames):
        return None
    user_frames = [frame for frame in frames if not frame.file.startswith((_OURS, *_LIBRARIES))]
    ours = [frame for frame in frames if frame.file.startswith(_OURS)]
    return str((user_frames or ours or frames)[0])


def _waits(frame: _Frame) -> bool:
    return any(part in frame.file and function in ("", frame.function) for part, function in _WAITS)
