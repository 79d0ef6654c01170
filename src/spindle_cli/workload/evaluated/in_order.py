"""A dataset read once, in its own order: what an evaluation takes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.data.streams import StreamPass
from spindle_cli.workload.graph import ValueSpec
from spindle_cli.workload.training.absent import filled
from spindle_cli.workload.training.batches import collate, num_samples
from spindle_cli.workload.training.epochs import Epochs
from spindle_cli.workload.training.item_draws import SeededCalls, generators_kept
from spindle_cli.workload.types import FlowTask, Task


class ReadBatch(Protocol):
    """A batch of so many samples: the task's `batch_size`, and of the last one what is left."""

    @property
    def size(self) -> int: ...

    def rows(self, first: int, last: int, fields: Collection[str]) -> Mapping[str, Tensor]:
        """Samples [first, last), collated; of the named fields those that there are."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of one sample of each field, for tasks whose batches have several lengths."""


class Pass(Protocol):
    """A task's data for an evaluation."""

    def batches(self) -> Iterator[ReadBatch]:
        """All of it, from its first sample to its last."""

    def first(self) -> ReadBatch | None:
        """The first batch, before anything is evaluated; None: there is no sample."""


class InOrder:
    """A map-style dataset, batch by batch in its order; only the rows that are asked for are read, but where
    `reads_whole`.

    What an item draws follows from the seed and its index, in every evaluation alike; of a dataset with
    epochs it is its first.
    """

    def __init__(self, task: Task | FlowTask, seed: int, *, varies: bool = False) -> None:
        """`task`: with the dataset that it is evaluated on as its own. `varies`: samples may have other sizes
        from batch to batch, so that all of a batch is read.

        Raises:
            WorkloadError: the dataset is not map-style.
        """
        self.task = task
        # A collate may pad, or mix samples.
        self.reads_whole = varies or task.collate is not None
        self._epochs = Epochs(task, seed)
        self._reads = SeededCalls(seed, task.name, "sample")
        self._collates = SeededCalls(seed, task.name, "batch")
        self.num_samples = num_samples(task)

    @property
    def num_batches(self) -> int:
        """The last may not be full."""
        return -(-self.num_samples // self.task.batch_size)

    def batches(self) -> Iterator[ReadBatch]:
        """See `Pass`."""
        for number in range(self.num_batches):
            yield _Numbered(self, number)

    def first(self) -> ReadBatch | None:
        """See `Pass`."""
        return next(self.batches(), None)

    def size(self, number: int) -> int:
        """Samples of a batch."""
        return min(self.task.batch_size, self.num_samples - number * self.task.batch_size)

    def rows(self, number: int, first: int, last: int) -> dict[str, Tensor]:
        """Samples [first, last) of a batch, as far as there are, collated.

        Raises:
            WorkloadError: items cannot be collated.
            Exception: whatever the dataset raised, with a note of the samples.
        """
        whole = self.reads_whole
        begin = number * self.task.batch_size
        start, stop = (0, self.size(number)) if whole else (first, min(last, self.size(number)))
        with generators_kept():
            try:
                with self._epochs.at(0):
                    items = [self._item(index) for index in range(begin + start, begin + stop)]
                    batch = self._collates.call(partial(collate, self.task, items), 0, number)
            except Exception as error:
                error.add_note(
                    f"while loading samples {begin + start} to {begin + stop - 1} of the dataset that task "
                    f"{self.task.name!r} is evaluated on"
                )
                raise
        return {name: field[first:last] for name, field in batch.items()} if whole else batch

    def _item(self, index: int) -> Any:
        item = self._reads.call(partial(operator.getitem, self.task.dataset, index), 0, index)
        return filled(self.task.name, self.task.absent, item)


class StreamInOrder:
    """A stream, read whole by this process; what it draws is the same in every evaluation."""

    def __init__(self, task: Task | FlowTask, seed: int) -> None:
        """`task`: with the dataset that it is evaluated on as its own."""
        self._task = task
        self._seed = seed

    def batches(self) -> Iterator[ReadBatch]:
        """See `Pass`."""
        for batch in stream_batches(self._task, self._seed):
            yield _Held(batch)

    def first(self) -> ReadBatch | None:
        """See `Pass`."""
        return next(self.batches(), None)


def stream_batches(task: Task | FlowTask, seed: int) -> Iterator[dict[str, Tensor]]:
    """The batches of one pass over a stream; the last has what is left."""
    passing = StreamPass(task, seed, 0, lambda read: read(), keeps_rest=True)
    return (piece.made for piece in passing)


def require_fields(
    task: str, wanted: Mapping[str, ValueSpec], names: Collection[str], found: Mapping[str, Tensor]
) -> None:
    """Refuse data that are other than what a task is traced with.

    Raises:
        WorkloadError: a field is missing, or has another shape or kind of numbers.
    """
    for name in names:
        if name not in found:
            raise WorkloadError(
                f"task {task!r}: the dataset to evaluate it on gives no field {name!r}",
                hint="Its items need the fields of the dataset that the task is trained on.",
            )
        spec, field = wanted[name], found[name]
        shape = tuple(field.shape[1:])
        if shape != spec.shape[1:] or field.is_floating_point() != spec.dtype.is_floating_point:
            raise WorkloadError(
                f"task {task!r}: field {name!r} of the dataset to evaluate it on has shape {shape} and dtype "
                f"{field.dtype} for a sample; it is trained on {spec.shape[1:]} and {spec.dtype}",
                hint="Pad, crop or convert it to what the task is trained on.",
            )


class _Numbered:
    """A batch of a map-style dataset."""

    def __init__(self, data: InOrder, number: int) -> None:
        self._data, self._number = data, number
        self.size = data.size(number)
        self._whole: dict[str, Tensor] | None = None

    def rows(self, first: int, last: int, fields: Collection[str]) -> Mapping[str, Tensor]:
        """See `ReadBatch`."""
        if self._data.reads_whole:
            found = {name: field[first:last] for name, field in self._read().items()}
        else:
            found = self._data.rows(self._number, first, last)
        return {name: found[name] for name in fields if name in found}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `ReadBatch`."""
        return shapes_of(self._read())

    def _read(self) -> dict[str, Tensor]:
        if self._whole is None:
            self._whole = self._data.rows(self._number, 0, self.size)
        return self._whole


class _Held:
    """A batch that is there."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self._batch = batch
        self.size = min((len(field) for field in batch.values()), default=0)

    def rows(self, first: int, last: int, fields: Collection[str]) -> Mapping[str, Tensor]:
        """See `ReadBatch`."""
        return {name: self._batch[name][first:last] for name in fields if name in self._batch}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `ReadBatch`."""
        return shapes_of(self._batch)


def shapes_of(batch: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of one sample of each field."""
    return {name: tuple(field.shape[1:]) for name, field in batch.items()}
