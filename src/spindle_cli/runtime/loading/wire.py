"""What passes between a loading process and the ranks of its node, over a socket of theirs: batches, and
why one could not be loaded, or that the process has died.

A rank asks by a number, 8 bytes: of the batch. The answer is the length of a JSON document, 8 bytes with the
batch's descriptor beside them, and the document: the batch's fields, or why there is no such batch.
"""

from __future__ import annotations

import array
import json
import signal
import socket
import struct
import time
import traceback
from collections.abc import Collection
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from spindle_cli.errors import InputError, RunFailedError, SpindleError, WorkerLostError, WorkloadError
from spindle_cli.workload.refuse import place_of_error

_NUMBER = struct.Struct("<q")


def ask(connection: socket.socket, number: int) -> None:
    """Ask for a batch."""
    connection.sendall(_NUMBER.pack(number))


def receive_request(connection: socket.socket) -> int | None:
    """The batch that is asked for; None: the other side has gone."""
    data = _exactly(connection, _NUMBER.size)
    return None if data is None else int(_NUMBER.unpack(data)[0])


def send_answer(connection: socket.socket, document: dict[str, Any], descriptor: int | None) -> None:
    """Answer with a document and a descriptor, which the other side gets a copy of."""
    data = json.dumps(document).encode()
    descriptors = [] if descriptor is None else [descriptor]
    socket.send_fds(connection, [_NUMBER.pack(len(data))], descriptors)
    connection.sendall(data)


def receive_answer(connection: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """The answer; None: the other side has gone."""
    size = array.array("i").itemsize
    head, ancillary, _, _ = connection.recvmsg(_NUMBER.size, socket.CMSG_LEN(size))
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % size])
    rest = _exactly(connection, _NUMBER.size - len(head)) if head else None
    text = None if rest is None else _exactly(connection, _NUMBER.unpack(head + rest)[0])
    if text is None:
        return None
    document: dict[str, Any] = json.loads(text)
    return document, descriptors[0] if descriptors else None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    received = b""
    while len(received) < count:
        more = connection.recv(count - len(received))
        if not more:
            return None
        received += more
    return received


_KINDS = {kind.__name__: kind for kind in (WorkloadError, InputError, WorkerLostError, RunFailedError)}


@dataclass(frozen=True)
class Failure:
    """An error as text. `kind`: the class of ours that it is raised as."""

    message: str
    hint: str | None
    kind: str

    @classmethod
    def of(cls, task: str, error: BaseException) -> Failure:
        """Describe what loading a batch has raised; what code of the user's raises is named with its place,
        and its traceback is in this process's output.
        """
        notes = getattr(error, "__notes__", ())
        if isinstance(error, SpindleError):
            kind = next((k for k in _KINDS if isinstance(error, _KINDS[k])), RunFailedError.__name__)
            return cls("\n  ".join((error.message, *notes)), error.hint, kind)
        traceback.print_exception(error)
        place = place_of_error(error)
        text = str(error).strip().split("\n")[0]
        raised = f"{type(error).__name__}: {text}" if text else type(error).__name__
        message = f"{f'{place}: ' if place else ''}task {task!r}: its dataset raised {raised}"
        hint = "The whole traceback is in the worker's output (workers/ of the run's folder)."
        return cls("\n  ".join((message, *notes)), hint, RunFailedError.__name__)

    def raised(self) -> SpindleError:
        """The error to raise where the batch was waited for."""
        return _KINDS[self.kind](self.message, hint=self.hint)

    def to_json(self) -> dict[str, Any]:
        """Gives the arguments that `Failure` makes the same failure of."""
        return asdict(self)


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
