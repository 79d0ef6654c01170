"""Workers that are forked from a process which has imported all they need, so that they start at once.

Importing torch takes 2 s of processor time, which otherwise every worker spends. The process that forks has
done nothing but imports: it has run no operation of torch's, and neither threads nor CUDA are there to be
lost in a fork. Each worker waits at its pipe to be told its environment, which is known only after the nodes
have met.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn

from spindle_cli.process.environment import join_environment
from spindle_cli.process.lifetime import die_with_parent, lasting_imports

# What torch imports the first time that it makes an optimizer, or runs on tensors without values.
IMPORTED_LATE = ("torch._dynamo",)
_POLL_S = 0.02


def preload(*modules: str) -> None:
    """Import modules; nothing of them runs."""
    with lasting_imports():
        for name in modules:
            import_module(name)


@dataclass
class ForkedWorker:
    """A worker of this node. `exit_code`: minus the signal's number where one killed it; `ended_s`: when it
    was noticed, since the epoch.
    """

    pid: int
    told_through: int
    exit_code: int | None = None
    ended_s: float = 0.0

    def begin(self, environment: Mapping[str, str]) -> None:
        """Tell the worker its environment; it begins its work."""
        with contextlib.suppress(BrokenPipeError), os.fdopen(self.told_through, "w") as pipe:  # it has died
            json.dump(dict(environment), pipe)

    def look(self) -> int | None:
        """Return the exit code; None while the worker runs."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code, self.ended_s = os.waitstatus_to_exitcode(status), time.time()
        return self.exit_code

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the worker has ended."""
        if self.look() is None:
            os.kill(self.pid, number)


def fork_workers(count: int, work: Callable[[], object]) -> tuple[ForkedWorker, ...]:
    """Fork so many workers, which do `work` once they are told their environment."""
    workers: list[ForkedWorker] = []
    for _ in range(count):
        receives, tells = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(tells)
            for sibling in workers:
                os.close(sibling.told_through)
            _live(parent, receives, work)
        os.close(receives)
        workers.append(ForkedWorker(pid, tells))
    return tuple(workers)


def _live(parent: int, receives: int, work: Callable[[], object]) -> NoReturn:
    """Live a worker's whole life: be told the environment, do the work, and end."""
    code = 1
    try:
        _become_worker(parent)
        with os.fdopen(receives) as pipe:
            told = pipe.read()
        if told:  # else the process that was to tell has ended
            join_environment(json.loads(told))
            work()
            code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_worker(parent: int) -> None:
    """A session of its own, and nothing left of what the parent has set for itself."""
    die_with_parent()
    if os.getppid() != parent:  # it was faster
        sys.exit(1)
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def end_workers(workers: Sequence[ForkedWorker], grace_s: float) -> None:
    """Ask all that still run to end, and kill after `grace_s` those that do not."""
    for worker in workers:
        worker.send(signal.SIGTERM)
    give_up_at = time.monotonic() + grace_s
    while any(worker.look() is None for worker in workers) and time.monotonic() < give_up_at:
        time.sleep(_POLL_S)
    for worker in workers:
        worker.send(signal.SIGKILL)
    while any(worker.look() is None for worker in workers):
        time.sleep(_POLL_S)
