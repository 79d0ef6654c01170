"""Iterable datasets: the batches of one pass over a stream, with what their samples draw, and where it is.

A stream's order is its own. What is read at a place draws the same whoever reads it, as items of map-style
datasets do (training/item_draws.py): each sample is asked for from a seed that follows from the training
seed, the task, the epoch, the loader's worker, and how many samples this one has asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from spindle_cli.units import format_seconds
from spindle_cli.workload.data.seen_data import digest_of
from spindle_cli.workload.data.state_json import from_json, to_json
from spindle_cli.workload.training.absent import filled
from spindle_cli.workload.training.batches import collate
from spindle_cli.workload.training.epochs import Epochs
from spindle_cli.workload.training.item_draws import SeededCalls, generators_kept
from spindle_cli.workload.types import FlowTask, Task

T = TypeVar("T")

Batch = dict[str, Tensor]
# Makes of how a batch is loaded (None: there is none any more) what is handed on; None of None.
Make = Callable[[Callable[[], Batch | None]], T | None]

_END = object()


@dataclass(frozen=True)
class Piece(Generic[T]):
    """What was made of a batch, and of the first of each worker a digest of its first sample."""

    made: T
    digest: str | None


class StreamPass(IterableDataset[Piece[T]]):
    """One pass over a task's stream, batch by batch. Samples that fill no batch at its end are left out, or
    (`keeps_rest`) are a smaller one.

    Its state says how many samples it has asked for, and has that of the dataset or of its iterator where
    they have `state_dict` and `load_state_dict`. To go on without one, as many samples are read and left.
    """

    def __init__(
        self, task: Task | FlowTask, seed: int, epoch: int, make: Make[T], *, keeps_rest: bool = False
    ) -> None:
        self._task = task
        self._epoch = epoch
        self._keeps_rest = keeps_rest
        self._make = make
        self._reads = SeededCalls(seed, task.name, "stream", epoch)
        self._collates = SeededCalls(seed, task.name, "stream batch", epoch)
        self._epochs = Epochs(task, seed)
        self._place: dict[str, Any] = {"samples": 0, "dataset": None, "iterator": None}
        self._begins_at = self._place

    def state_dict(self) -> dict[str, Any]:
        """Where this worker is: JSON."""
        return self._place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin there the next time."""
        self._begins_at = self._place = dict(state)

    def __iter__(self) -> Iterator[Piece[T]]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        begins_at, self._begins_at = self._begins_at, {"samples": 0, "dataset": None, "iterator": None}
        samples: Iterator[Any] | None = None
        asked = 0
        digest: str | None = None

        def load() -> Batch | None:
            nonlocal samples, asked, digest
            with generators_kept(), ExitStack() as within:
                if samples is None:
                    samples, asked = self._begun(worker, begins_at)
                within.enter_context(self._epochs.at(self._epoch))
                first = asked
                items: list[Any] = []
                while len(items) < self._task.batch_size:
                    item = self._next(samples, worker, asked)
                    if item is _END and items and self._keeps_rest:
                        break
                    if item is _END:
                        return None
                    asked += 1
                    items.append(filled(self._task.name, self._task.absent, item))
                digest = digest_of(items[0]) if first == 0 else None
                batch = self._collates.call(partial(collate, self._task, items), worker, first)
            self._place = self._now(samples, asked)
            return batch

        while (made := self._make(load)) is not None:
            yield Piece(made, digest)

    def _begun(self, worker: int, place: Mapping[str, Any]) -> tuple[Iterator[Any], int]:
        """The dataset's iterator at that place, and how many samples it was asked for before."""
        dataset = self._task.dataset
        self._epochs.begin(self._epoch)
        if place["dataset"] is not None:
            dataset.load_state_dict(from_json(place["dataset"]))
        samples: Any = iter(dataset)
        if place["iterator"] is not None:
            samples.load_state_dict(from_json(place["iterator"]))
        elif place["dataset"] is None and place["samples"]:
            self._read_again(samples, worker, place["samples"])
        return samples, place["samples"]

    def _read_again(self, samples: Any, worker: int, count: int) -> None:
        began = time.monotonic()
        for asked in range(count):
            self._next(samples, worker, asked)
        seconds = format_seconds(time.monotonic() - began)
        print(f"task {self._task.name!r}: {count} samples of its stream were read again, to go on: {seconds}")

    def _next(self, samples: Iterator[Any], worker: int, asked: int) -> Any:
        try:
            # The first draws the same in all workers, so that those which read the same samples are noticed.
            return self._reads.call(lambda: next(samples, _END), worker if asked else 0, asked)
        except Exception as error:
            where = "" if worker == 0 else f" of loader worker {worker}"
            error.add_note(f"at sample {asked}{where} in epoch {self._epoch} of the stream")
            raise

    def _now(self, samples: Any, asked: int) -> dict[str, Any]:
        dataset, name = self._task.dataset, self._task.name
        inner = iterator = None
        if samples is not dataset and _keeps_state(samples):
            iterator = to_json(samples.state_dict(), name)
        elif _keeps_state(dataset):
            inner = to_json(dataset.state_dict(), name)
        return {"samples": asked, "dataset": inner, "iterator": iterator}


def _keeps_state(value: Any) -> bool:
    """Whether it goes on by a state of its own, exactly."""
    return (
        hasattr(value, "state_dict") and hasattr(value, "load_state_dict") and not _leaves_out_buffer(value)
    )


def _leaves_out_buffer(dataset: Any) -> bool:
    """Whether it is one of Hugging Face that shuffles in a buffer: its state has not what is in the buffer,
    so that these samples would be lost.
    """
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if "BufferShuffled" in type(part).__name__:
            return True
        if part is not None:
            parts += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return False
