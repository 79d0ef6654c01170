"""The process that loads a task's batches for all ranks of its node, alone or with workers of its own."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import torch

from spindle_cli.process.parent_death import die_with_parent
from spindle_cli.runtime.loading import wire
from spindle_cli.runtime.loading.failure import Failure
from spindle_cli.runtime.loading.lost_worker import cause_of, leave_workers_unwatched
from spindle_cli.runtime.loading.packed import PackedBatch
from spindle_cli.runtime.loading.shelf import ClosedError, Loaded, Shelf
from spindle_cli.units import format_seconds
from spindle_cli.workload.data.kind import is_stream
from spindle_cli.workload.data.loaders import LoaderWorkers, read_by_index, read_stream
from spindle_cli.workload.data.streams import Make, StreamPass
from spindle_cli.workload.evaluated.in_order import InOrder
from spindle_cli.workload.settings.loader import Loading
from spindle_cli.workload.training.batches import Batches
from spindle_cli.workload.types import FlowTask, Task


@dataclass(frozen=True)
class Reading:
    """What a reader is to do.

    Attributes:
        numbers: of the batches that the run takes.
        takers: ranks that take samples of them.
        room: batches that are ready before they are taken.
        state: where a stream is to begin: behind the batch before the first of `numbers`; None: at its
            beginning, so that what was trained on before has to be read again.
        evaluates: one pass over the data after another is read, in its order, each with its last smaller
            batch and behind that one without a field; batches are numbered through all passes.
    """

    task: Task | FlowTask
    seed: int
    loading: Loading
    numbers: range
    takers: int
    room: int
    state: dict[str, Any] | None = None
    evaluates: bool = False


def start_reader(reading: Reading, listener: socket.socket) -> int:
    """Fork it; returns its process id. By the main thread: it ends when that one does."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            _live(reading, listener, parent)
        except BaseException as error:  # nothing of the parent's may go on in its child
            traceback.print_exception(error)
        finally:
            os._exit(1)
    return child


def _live(reading: Reading, listener: socket.socket, parent: int) -> NoReturn:
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        # The run's end is its ranks' business; a terminal's Ctrl-C reaches every process.
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # a fork has no threads of OpenMP
    serve(reading, listener)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(reading: Reading, listener: socket.socket) -> None:
    """Load batches until all takers have gone."""
    shelf = Shelf(reading.numbers.start, reading.room, range(reading.takers))
    threading.Thread(target=_welcome, args=(listener, shelf, reading.takers), daemon=True).start()
    workers = LoaderWorkers(_begin)
    try:
        _fill(shelf, reading, workers)
    except ClosedError:
        return
    except BaseException as error:  # sys.exit too; a dead worker is a RuntimeError from wherever this one is
        shelf.fail(Failure.of(reading.task.name, cause_of(reading.task.name, error, workers.processes)))
    shelf.wait_until_left()


def _fill(shelf: Shelf, reading: Reading, workers: LoaderWorkers) -> None:
    try:
        for loaded in _load(reading, workers):
            if isinstance(loaded, Failure):
                shelf.fail(loaded)
                break
            shelf.put(loaded)
    finally:
        leave_workers_unwatched()


def _load(reading: Reading, workers: LoaderWorkers) -> Iterator[Loaded | Failure]:
    task = reading.task

    def load(read: Callable[[], dict[str, torch.Tensor] | None]) -> PackedBatch | Failure | None:
        try:
            batch = read()
            return None if batch is None else PackedBatch.of(batch)
        except BaseException as error:  # sys.exit too
            return Failure.of(task.name, error)

    make: Make[PackedBatch | Failure] = load
    if reading.evaluates:
        yield from _passes(reading, make, workers)
        return
    if not is_stream(task):
        batches = Batches(task, reading.seed, one_shape=False)  # whoever takes them looks at their shapes
        by_index: Iterator[PackedBatch | Failure] = read_by_index(
            batches, reading.numbers, reading.loading, make, workers
        )
        for made in by_index:
            yield made if isinstance(made, Failure) else Loaded(made, None)
        return
    stream: Iterator[tuple[PackedBatch | Failure, dict[str, Any]]] = read_stream(
        task, reading.seed, reading.loading, make, reading.state, workers
    )
    if reading.state is None:
        _skip(task, stream, reading.numbers.start)
    for _, (made, state) in zip(reading.numbers, stream, strict=False):
        yield made if isinstance(made, Failure) else Loaded(made, state)


def _passes(
    reading: Reading, make: Make[PackedBatch | Failure], workers: LoaderWorkers
) -> Iterator[Loaded | Failure]:
    while True:
        for made in _one_pass(reading, make, workers):
            yield made if isinstance(made, Failure) else Loaded(made, None)
        yield Loaded(PackedBatch.of({}), None)


def _one_pass(
    reading: Reading, make: Make[PackedBatch | Failure], workers: LoaderWorkers
) -> Iterator[PackedBatch | Failure]:
    if is_stream(reading.task):  # one after the other: workers would each have a last smaller batch
        stream: StreamPass[PackedBatch | Failure]
        stream = StreamPass(reading.task, reading.seed, 0, make, keeps_rest=True)
        for piece in stream:
            yield piece.made
        return
    data = InOrder(reading.task, reading.seed)
    by_index: Iterator[PackedBatch | Failure]
    by_index = read_by_index(data, range(data.num_batches), reading.loading, make, workers)
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


def _welcome(listener: socket.socket, shelf: Shelf, takers: int) -> None:
    for taker in range(takers):
        connection = _accepted(listener)
        threading.Thread(target=_hand_out, args=(connection, shelf, taker), daemon=True).start()


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


def _hand_out(connection: socket.socket, shelf: Shelf, taker: int) -> None:
    try:
        while (number := wire.asked(connection)) is not None:
            found = shelf.take(taker, number)
            if isinstance(found, Failure):
                wire.answer(connection, {"failure": found.to_json()}, None)
            else:
                document = {"fields": found.batch.to_json(), "state": found.state}
                wire.answer(connection, document, found.batch.descriptor)
    except ConnectionError:
        pass
    finally:
        shelf.leave(taker)
