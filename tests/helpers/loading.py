"""A process that loads batches, and its takers, without a run around them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers.anything import Anything
from spindle_cli.runtime.loading.client import NodeBatches
from spindle_cli.runtime.loading.reader import Order, Reader, Source
from spindle_cli.workload.settings.types import Loading
from spindle_cli.workload.types import Task

SEED = 3


def task_of(dataset: Any, **rest: Any) -> Task:
    return Task("t", Anything(), 4, dataset, **rest)


@contextmanager
def read(
    task: Task, numbers: range, workers: int = 0, takers: int = 1, **rest: Any
) -> Iterator[list[NodeBatches]]:
    """A reader of the task, and its takers."""
    reader = Reader(Source(task, SEED, Loading(workers, 2), rest.pop("evaluates", False)))
    reader.begin(Order(numbers, takers, rest.pop("room", 6), **rest))
    found = [
        NodeBatches("t", reader.address, reader.process if taker == 0 else None) for taker in range(takers)
    ]
    try:
        yield found
    finally:
        for each in found:
            each.close()
        with_end(reader.process)


def with_end(child: int) -> None:
    """A process ends by itself, soon."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            if os.waitpid(child, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the reader did not end")
