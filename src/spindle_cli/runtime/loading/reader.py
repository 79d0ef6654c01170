"""The process that loads a task's batches for all ranks of its node, alone or with workers of its own.

It is forked when the workload is built, before its parent touches a GPU and meets other workers: a fork of a
process that uses CUDA, and has the threads of NCCL and gloo, may use none of it, and hang in what they held.
Which batches it is to load is known later: it waits to be told.

Batches that are loaded are kept until every rank that takes samples of them has done so.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch

from spindle_cli.analysis.evaluation import InOrder
from spindle_cli.process.lifetime import die_with_parent
from spindle_cli.runtime.loading import wire
from spindle_cli.runtime.loading.packed import PackedBatch
from spindle_cli.runtime.loading.wire import Failure, cause_of, leave_workers_unwatched
from spindle_cli.training.batches import Batches
from spindle_cli.training.data.reading import LoaderWorkers, read_by_index, read_stream
from spindle_cli.training.data.streams import Make, StreamPass, is_stream
from spindle_cli.units import format_seconds
from spindle_cli.workload.settings.types import Loading
from spindle_cli.workload.types import FlowTask, Task

_BACKLOG = 1024


@dataclass(frozen=True)
class Source:
    """What a reader reads.

    `evaluates`: one pass over the data after another is read, in its order, each with its last smaller batch
    and behind that one without a field; batches are numbered through all passes.
    """

    task: Task | FlowTask
    seed: int
    loading: Loading
    evaluates: bool = False


@dataclass(frozen=True)
class Order:
    """Which batches a reader is to load.

    Attributes:
        numbers: of the batches that the run takes.
        takers: ranks that take samples of them.
        room: batches that are ready before they are taken.
        state: where a stream is to begin: behind the batch before the first of `numbers`; None: at its
            beginning, so that what was trained on before has to be read again.
    """

    numbers: range
    takers: int
    room: int
    state: dict[str, Any] | None = None

    def to_json(self) -> str:
        """Writes the order as a line of JSON."""
        document = asdict(self) | {"numbers": [self.numbers.start, self.numbers.stop]}
        return json.dumps(document)

    @classmethod
    def from_json(cls, line: str) -> Order:
        """Return the order that `to_json` has written."""
        document = json.loads(line)
        return cls(**{**document, "numbers": range(*document["numbers"])})


class Reader:
    """A reader that was forked, and does nothing until it is told what. By the main thread: it ends when
    that one does.

    `address`: where it will hand out batches. `process`: its number.
    """

    def __init__(self, source: Source, forget: Callable[[], None] = lambda: None) -> None:
        """`forget`: called in the reader, to give up what it has of its parent's and does not need."""
        listener, self.address = _listen()
        self._orders, theirs = socket.socketpair()
        parent = os.getpid()
        self.process = os.fork()
        if self.process == 0:
            try:
                self._orders.close()
                forget()
                _live(source, listener, theirs, parent)
            except BaseException as error:  # nothing of the parent's may go on in its child
                traceback.print_exception(error)
            finally:
                os._exit(1)
        listener.close()
        theirs.close()

    def begin(self, order: Order) -> None:
        """Have it load batches, until all takers have gone."""
        with suppress(ConnectionError):  # it has ended already: who takes batches hears of it
            self._orders.sendall(f"{order.to_json()}\n".encode())
        self._orders.close()

    def forget(self) -> None:
        """Closes, in the process of another reader, what is this one's."""
        self._orders.close()

    def dismiss(self) -> None:
        """Have the loading process end, as nobody needs it."""
        with suppress(OSError):
            self._orders.shutdown(socket.SHUT_RDWR)  # also where a fork has it
        self._orders.close()


def _listen() -> tuple[socket.socket, str]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"spindle-{secrets.token_hex(16)}"
    if sys.platform == "linux":  # a name without a file, which goes with the process
        address = f"\0{name}"
    else:
        address = str(Path(tempfile.mkdtemp(prefix="spindle-")) / "loader")
    listener.bind(address)
    listener.listen(_BACKLOG)
    return listener, address


def _live(source: Source, listener: socket.socket, orders: socket.socket, parent: int) -> NoReturn:
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        # The run's end is its ranks' business; a terminal's Ctrl-C reaches every process.
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # a fork has no threads of OpenMP
    with orders.makefile(encoding="utf-8") as lines:
        line = lines.readline()
    orders.close()
    if line:
        torch.manual_seed(source.seed)  # whatever its parent had drawn
        serve(source, Order.from_json(line), listener)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(source: Source, order: Order, listener: socket.socket) -> None:
    """Load batches until all takers have gone."""
    buffer = PrefetchBuffer(order.numbers.start, order.room, range(order.takers))
    threading.Thread(target=_welcome, args=(listener, buffer, order.takers), daemon=True).start()
    workers = LoaderWorkers(_begin)
    try:
        _fill(buffer, source, order, workers)
    except ClosedError:
        return
    except BaseException as error:  # sys.exit too; a dead worker is a RuntimeError from wherever this one is
        buffer.fail(Failure.of(source.task.name, cause_of(source.task.name, error, workers.processes)))
    buffer.wait_until_left()


def _fill(buffer: PrefetchBuffer, source: Source, order: Order, workers: LoaderWorkers) -> None:
    try:
        for loaded in _load(source, order, workers):
            if isinstance(loaded, Failure):
                buffer.fail(loaded)
                break
            buffer.put(loaded)
    finally:
        leave_workers_unwatched()


def _load(source: Source, order: Order, workers: LoaderWorkers) -> Iterator[Loaded | Failure]:
    task = source.task

    def load(read: Callable[[], dict[str, torch.Tensor] | None]) -> PackedBatch | Failure | None:
        try:
            batch = read()
            return None if batch is None else PackedBatch.of(batch)
        except BaseException as error:  # sys.exit too
            return Failure.of(task.name, error)

    make: Make[PackedBatch | Failure] = load
    if source.evaluates:
        yield from _passes(source, make, workers)
        return
    if not is_stream(task):
        batches = Batches(task, source.seed, one_shape=False)  # whoever takes them looks at their shapes
        by_index: Iterator[PackedBatch | Failure] = read_by_index(
            batches, order.numbers, source.loading, make, workers
        )
        for made in by_index:
            yield made if isinstance(made, Failure) else Loaded(made, None)
        return
    stream: Iterator[tuple[PackedBatch | Failure, dict[str, Any]]] = read_stream(
        task, source.seed, source.loading, make, order.state, workers
    )
    if order.state is None:
        _skip(task, stream, order.numbers.start)
    for _, (made, state) in zip(order.numbers, stream, strict=False):
        yield made if isinstance(made, Failure) else Loaded(made, state)


def _passes(
    source: Source, make: Make[PackedBatch | Failure], workers: LoaderWorkers
) -> Iterator[Loaded | Failure]:
    while True:
        for made in _one_pass(source, make, workers):
            yield made if isinstance(made, Failure) else Loaded(made, None)
        yield Loaded(PackedBatch.of({}), None)


def _one_pass(
    source: Source, make: Make[PackedBatch | Failure], workers: LoaderWorkers
) -> Iterator[PackedBatch | Failure]:
    if is_stream(source.task):  # one after the other: workers would each have a last smaller batch
        stream: StreamPass[PackedBatch | Failure]
        stream = StreamPass(source.task, source.seed, 0, make, keeps_rest=True)
        for item in stream:
            yield item.made
        return
    data = InOrder(source.task, source.seed)
    by_index: Iterator[PackedBatch | Failure]
    by_index = read_by_index(data, range(data.num_batches), source.loading, make, workers)
    yield from by_index


def _skip(
    task: Task | FlowTask, stream: Iterator[tuple[PackedBatch | Failure, dict[str, Any]]], count: int
) -> None:
    """Leave batches out, and say what that takes."""
    began = time.monotonic()
    for made, _ in islice(stream, count):
        if isinstance(made, Failure):
            raise made.raised()
        made.close()
    if count:
        seconds = format_seconds(time.monotonic() - began)
        print(f"task {task.name!r}: {count} batches of its stream were read again, to go on: {seconds}")


def _begin(_: int) -> None:
    die_with_parent()


def _welcome(listener: socket.socket, buffer: PrefetchBuffer, takers: int) -> None:
    for taker in range(takers):
        connection = _accepted(listener)
        threading.Thread(target=_hand_out, args=(connection, buffer, taker), daemon=True).start()


def _accepted(listener: socket.socket) -> socket.socket:
    """A connection of a process of the same user's."""
    while True:
        connection, _ = listener.accept()
        if not hasattr(socket, "SO_PEERCRED"):
            return connection  # the socket is a file that is this user's alone
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid():
            return connection
        connection.close()


def _hand_out(connection: socket.socket, buffer: PrefetchBuffer, taker: int) -> None:
    try:
        while (number := wire.receive_request(connection)) is not None:
            batch = buffer.take(taker, number)
            if isinstance(batch, Failure):
                wire.send_answer(connection, {"failure": batch.to_json()}, None)
            else:
                document = {"fields": batch.batch.to_json(), "state": batch.state}
                wire.send_answer(connection, document, batch.batch.descriptor)
    except ConnectionError:
        pass
    finally:
        buffer.leave(taker)


@dataclass(frozen=True)
class Loaded:
    """A batch, and where its dataset is after it: what to go on from (JSON); None for a map-style one."""

    batch: PackedBatch
    state: dict[str, Any] | None


class ClosedError(Exception):
    """Nobody takes batches any more."""


class PrefetchBuffer:
    """Batches that were loaded ahead: one thread puts them in, in order; each taker, in a thread of its own,
    takes all of them, in order.

    A batch is let go when all takers have asked for a later one.
    """

    def __init__(self, first: int, room: int, takers: Iterable[int]) -> None:
        """`first`: number of the first batch. `room`: so many are in it at most."""
        self._changed = threading.Condition()
        self._room = room
        self._needed_from = dict.fromkeys(takers, first)
        self._batches: dict[int, Loaded] = {}
        self._next = first
        self._failure: Failure | None = None

    def put(self, loaded: Loaded) -> None:
        """Put the next batch in, when there is room.

        Raises:
            ClosedError: all takers have gone.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._needed_from or self._next - min(self._needed_from.values()) < self._room
            )
            if not self._needed_from:
                loaded.batch.close()
                raise ClosedError
            self._batches[self._next] = loaded
            self._next += 1
            self._changed.notify_all()

    def fail(self, failure: Failure) -> None:
        """The next batch cannot be loaded: who asks for it is told why."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def take(self, taker: int, number: int) -> Loaded | Failure:
        """A batch, when it is there; those before are done with, for this taker. The batch's descriptor is
        valid until the taker asks for the next one.
        """
        with self._changed:
            self._needed_from[taker] = number
            self._let_go()
            self._changed.notify_all()
            self._changed.wait_for(lambda: number < self._next or self._failure is not None)
            if number < self._next:
                return self._batches[number]
            assert self._failure is not None
            return self._failure

    def leave(self, taker: int) -> None:
        """A taker has gone; the others are not held up by it."""
        with self._changed:
            self._needed_from.pop(taker, None)
            self._let_go()
            self._changed.notify_all()

    def wait_until_left(self) -> None:
        """Wait until all ranks that take batches have gone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._needed_from)

    def _let_go(self) -> None:
        needed = min(self._needed_from.values(), default=self._next)
        for number in [number for number in self._batches if number < needed]:
            self._batches.pop(number).batch.close()
