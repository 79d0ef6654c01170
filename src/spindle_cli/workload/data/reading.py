"""A task's batches read in this process, whichever kind of dataset it has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import copy
from typing import Any, Protocol

from torch import Tensor

from spindle_cli.errors import SpindleError, WorkloadError
from spindle_cli.workload.arguments import same_arguments
from spindle_cli.workload.data.kind import is_stream
from spindle_cli.workload.data.loaders import LoaderWorkers, read_stream
from spindle_cli.workload.data.streams import Make, StreamPass
from spindle_cli.workload.settings.loader import Loading
from spindle_cli.workload.training.batches import (
    Batches,
    dataset_failure,
    num_samples,
    require_length,
    require_same,
    same_batch,
    samples_by_index,
)
from spindle_cli.workload.training.epochs import Epochs
from spindle_cli.workload.training.item_draws import generators_kept
from spindle_cli.workload.types import FlowTask, Task


class BatchSource(Protocol):
    """Where a task's batches come from.

    `draws`: whether reading them draws random numbers in this process. `state`: where a stream is behind the
    batch that was read last, to go on from.
    """

    @property
    def draws(self) -> bool:
        """See above."""

    @property
    def state(self) -> dict[str, Any] | None:
        """See above."""

    def rows(
        self, step: int, first: int, last: int, fields: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Samples [first, last) of a step's batch; only the named fields if given."""

    def rows_without_draws(
        self, step: int, first: int, last: int, fields: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Give rows as `rows` does, for a thread beside others; raises DrawsError where random numbers are
        drawn.
        """

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """The shape of one sample of each field of a step's batch, whose rows were given last; of tasks whose
        sizes differ from batch to batch.
        """


class StreamBatches:
    """A stream's batches, in order; an earlier one than the last is read from the beginning again."""

    draws = False  # generators are as they were behind each call

    def __init__(
        self,
        task: Task | FlowTask,
        seed: int,
        loading: Loading | None = None,
        workers: LoaderWorkers | None = None,
    ) -> None:
        """`loading`: its number of workers gives the order. `workers`: see `LoaderWorkers`."""
        self.task = task
        self.state: dict[str, Any] | None = None
        self._seed = seed
        self._loading = loading or Loading(workers=0, prefetch=1)
        self._workers = workers
        self._next = 0
        self._batches: Iterator[tuple[dict[str, Tensor], dict[str, Any]]] | None = None
        self._held: tuple[int, dict[str, Tensor]] | None = None

    def rows(
        self, step: int, first: int, last: int, fields: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Samples [first, last) of a step's batch; only the named fields if given.

        Raises:
            WorkloadError: the stream has no such batch, or its samples make none.
        """
        if self._held is None or self._held[0] != step:
            with generators_kept():
                self._held = step, self._read(step)
        batch = self._held[1]
        return {name: value[first:last] for name, value in batch.items() if fields is None or name in fields}

    def rows_without_draws(
        self, step: int, first: int, last: int, fields: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Give rows as `rows` does, in no thread beside others: it seeds generators meanwhile."""
        return self.rows(step, first, last, fields)

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """The shape of one sample of each field of a step's batch."""
        return {name: tuple(value.shape[1:]) for name, value in self.rows(step, 0, 1).items()}

    def _read(self, step: int) -> dict[str, Tensor]:
        if self._batches is None or step < self._next:
            make: Make[dict[str, Tensor]] = lambda load: load()  # noqa: E731  # its type is said
            self._batches = read_stream(self.task, self._seed, self._loading, make, workers=self._workers)
            self._next = 0
        while True:
            batch, self.state = next(self._batches)
            self._next += 1
            if self._next > step:
                return batch


def open_batches(
    task: Task | FlowTask,
    seed: int,
    loading: Loading | None = None,
    workers: LoaderWorkers | None = None,
    *,
    varies: bool = False,
) -> Batches | StreamBatches:
    """A task's batches in this process; of a map-style dataset by no worker. `varies`: samples may have other
    sizes from batch to batch.

    Raises:
        WorkloadError: the dataset cannot be read, or has fewer samples than one batch.
    """
    if is_stream(task):
        return StreamBatches(task, seed, loading, workers)
    return Batches(task, seed, one_shape=not varies)


def first_samples(task: Task | FlowTask, count: int) -> dict[str, Tensor]:
    """A batch of the first `count` samples, or of all if there are fewer; the process's generators go on as
    if nothing had been drawn.

    Raises:
        WorkloadError: they are no batch, or others when they are read again from the same seed.
    """
    with generators_kept():
        if not is_stream(task):
            return require_same(task, lambda: samples_by_index(task, count))
        return require_same(task, lambda: _first_of_stream(task, count))


def require_epochs(task: Task | FlowTask, count: int) -> None:
    """Refuse a map-style dataset whose first `count` samples in its first epoch depend on what set_epoch was
    called with before: a run that goes on, and a process that loads every other batch, call it for some
    epochs alone.

    Raises:
        WorkloadError: they do; or it has another length in the second epoch.
    """
    epochs = Epochs(task, 0)
    if is_stream(task) or not epochs.told:
        return
    with generators_kept():
        known, before = num_samples(task), samples_by_index(task, count)
        try:
            with epochs.at(1):
                require_length(task, 1, known)
        except SpindleError:
            raise
        except Exception as error:  # code of the user's
            raise dataset_failure(task, "its second epoch", error) from error
        if not same_batch(before, samples_by_index(task, count)):
            raise WorkloadError(
                f"task {task.name!r}: after set_epoch(1) and then set_epoch(0) the dataset's samples are "
                "others than after set_epoch(0) alone",
                hint="Let set_epoch(epoch) make the dataset what it is in that epoch, whatever it was called "
                "with before: a run that goes on calls it for its own epoch alone.",
            )


def _first_of_stream(task: Task | FlowTask, count: int) -> dict[str, Tensor]:
    few = copy(task)
    same_arguments(few, task)
    for few.batch_size in range(count, 0, -1):
        make: Make[dict[str, Tensor]] = lambda load: load()  # noqa: E731  # its type is said
        for piece in StreamPass(few, 0, 0, make):
            same_arguments(task, few)
            return piece.made
    raise WorkloadError(f"task {task.name!r}: the dataset is empty", hint="Give it at least one batch.")
