"""Start the launch's command, wait for it, and end it with everything it has started."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import WorkerError, workers_dir
from spindle_cli.launch.build import SHUTDOWN_S
from spindle_cli.launch.starting.head_start import HeadStart, start_apart
from spindle_cli.launch.types import Launch
from spindle_cli.launch.watching.stuck import StuckWorker, find_stuck

POLL_S = 0.1
# After the first worker's error: time for the others' errors and torchrun's own end to come in.
AFTERMATH_S = SHUTDOWN_S + 1.5
# A kill takes effect at once, but for a process that waits for a disk.
KILLED_S = 3.0


@dataclass(frozen=True)
class Ending:
    """How a run's command ended. `stuck`: the workers that did not move when the others gave them up."""

    code: int
    stuck: tuple[StuckWorker, ...] = ()


def run_launch(launch: Launch, on_poll: Callable[[], None], head_start: HeadStart | None = None) -> Ending:
    """Run the command to its end. `on_poll` is called every `POLL_S` seconds and at the end. `head_start`: of
    the process that becomes the command, where there is one.

    A worker's error file ends everything within `AFTERMATH_S`. On any exception, `StuckError` and Ctrl-C
    among them, everything that was started is ended before it passes on.
    """
    write_json(launch.request_file, launch.request)
    earlier = _error_files(launch.run_dir)
    command = (head_start and head_start.take(launch)) or _start(launch)
    tree = ProcessTree(command)
    try:
        ending = _wait(launch, command, tree, on_poll, earlier)
    finally:
        tree.end()
    on_poll()
    return ending


def _start(launch: Launch) -> subprocess.Popen[bytes]:
    with launch.log.open("ab") as log:
        return start_apart(
            launch.argv, launch.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )


def _wait(
    launch: Launch,
    command: subprocess.Popen[bytes],
    tree: ProcessTree,
    on_poll: Callable[[], None],
    earlier: Mapping[Path, int],
) -> Ending:
    """`earlier`: error files that are not of this attempt; another node may not have removed its own yet."""
    give_up_at: float | None = None
    stuck: tuple[StuckWorker, ...] = ()
    while (code := command.poll()) is None:
        tree.look()
        on_poll()
        errors = _error_files(launch.run_dir) if give_up_at is None else {}
        errors = {path: written for path, written in errors.items() if earlier.get(path) != written}
        if errors:
            give_up_at = time.monotonic() + AFTERMATH_S
            if any(WorkerError.read(path).timed_out for path in errors):
                stuck = find_stuck(launch.run_dir)
        if give_up_at is not None and time.monotonic() > give_up_at:
            return Ending(1, stuck)
        time.sleep(POLL_S)
    return Ending(code, stuck)


def _error_files(run_dir: Path) -> dict[Path, int]:
    """The workers' error files, with when they were written (nanoseconds)."""
    written_ns: dict[Path, int] = {}
    for path in workers_dir(run_dir).glob("rank-*.error.json"):
        with contextlib.suppress(FileNotFoundError):  # another node removes its own when it starts again
            written_ns[path] = path.stat().st_mtime_ns
    return written_ns


class ProcessTree:
    """A process and all it has started, however they group themselves.

    torchrun gives each worker a session of its own, so no signal to a group reaches them all; and a process
    whose parent has died can no longer be found from the root. So the tree is remembered as it is seen.
    """

    def __init__(self, root: subprocess.Popen[bytes]) -> None:
        self._root = root
        self._seen: dict[int, psutil.Process] = {}
        self._looked_at = 0.0

    def look(self) -> None:
        """Remember what has been started, at most once a second: it reads all of /proc."""
        if time.monotonic() - self._looked_at < 1.0:
            return
        self._looked_at = time.monotonic()
        self._remember()

    def _remember(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._root.pid).children(recursive=True):
                self._seen.setdefault(child.pid, child)

    def end(self) -> None:
        """Kill whatever is left: workers have nothing to tidy up, and one that hangs would not be asked."""
        self._remember()
        if self._root.poll() is None:
            self._root.kill()
        self._root.wait()
        for process in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # psutil makes sure that it is still the same process
        psutil.wait_procs(list(self._seen.values()), timeout=KILLED_S)
