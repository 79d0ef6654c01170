"""Read the samples of a task as batches, by index or as a stream, and find the lengths that they have.

Batches go through torchdata's StatefulDataLoader, with processes that load them.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import product
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from spindle_cli.errors import SpindleError, WorkloadError
from spindle_cli.training.batches import (
    Batches,
    SampleShape,
    dataset_failure,
    num_samples,
    require_length,
    require_same,
    same_batch,
    samples_by_index,
)
from spindle_cli.training.data.streams import Make, StreamPass, from_json, is_stream, to_json
from spindle_cli.training.items import Epochs, generators_kept
from spindle_cli.workload.arguments import same_arguments
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.settings.types import FieldLengths, Loading, Looking, TaskLengths
from spindle_cli.workload.types import FlowTask, Task, Workload

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader


FEW = 2  # samples that a task is traced with: enough to see that items fit together
# Where samples are put together one by one, so many of them at a time: a batch for hundreds of devices may be
# larger than this machine.
_AT_ONCE = 256
# As long as all that was seen has one shape; where shapes differ, longer.
_LOOK_S = 1.0
_LOOK_AT_LENGTHS_S = 60.0

Shape = tuple[int, ...]  # of one sample


def find_lengths(workload: Workload, seed: int, looking: Looking) -> dict[str, TaskLengths]:
    """Find, by task, what differs in the shapes of its first batches, as training will take them; tasks whose
    batches have one shape are left out.

    Raises:
        WorkloadError: a batch cannot be read, a field has another number of dimensions than before, or
            set_epoch does not do what it has to.
    """
    lengths_by_task: dict[str, TaskLengths] = {}
    for task in workload.tasks:
        require_epochs(task, FEW)
        if is_stream(task) or num_samples(task) >= task.batch_size:
            lengths = _lengths_of(task, seed, looking)
            if lengths is not None:
                lengths_by_task[task.name] = lengths
    return lengths_by_task


def _lengths_of(task: Task | FlowTask, seed: int, looking: Looking) -> TaskLengths | None:
    few = {name: tuple(value.shape[1:]) for name, value in first_samples(task, FEW).items()}
    seen = _look_at(task, seed, looking.batches)
    fields: dict[str, FieldLengths] = {}
    for name, shapes in seen.items():
        # Without being told otherwise, a task is traced with a few samples, which may be shorter.
        every = [*shapes, few[name]] if len(set(shapes)) == 1 and name in few else shapes
        if len(set(every)) == 1:
            continue
        if len({len(shape) for shape in every}) > 1:
            different = next(shape for shape in every if len(shape) != len(shapes[0]))
            raise WorkloadError(
                f"task {task.name!r}: field {name!r} has other numbers of dimensions from batch to batch: "
                f"of one sample {shapes[0]} and {different}",
                hint="Only the sizes of dimensions may differ, not how many there are.",
            )
        sizes = list(zip(*every, strict=True))
        fields[name] = FieldLengths(
            planned=tuple(
                _percentile(dimension, looking.percentile) for dimension in zip(*shapes, strict=True)
            ),
            shortest=tuple(map(min, sizes)),
            longest=tuple(map(max, sizes)),
        )
    count = len(next(iter(seen.values()), ()))
    return TaskLengths(batches=count, percentile=looking.percentile, fields=fields) if fields else None


def _look_at(task: Task | FlowTask, seed: int, most: int) -> dict[str, list[Shape]]:
    """Return the shapes of each field's samples, batch by batch.

    Raises:
        WorkloadError: a batch cannot be read, or its samples have several shapes and nothing pads them.
    """
    batches: Batches | StreamBatches
    size = at_once = task.batch_size
    if is_stream(task):
        batches = StreamBatches(task, seed)
    else:
        # A collate may need all of a batch to pad it.
        batches = Batches(task, seed, one_shape=False, whole=task.collate is not None)
        if not batches.has_epochs:  # later ones have the same samples
            most = min(most, batches.steps_per_epoch)
        at_once = size if task.collate is not None else min(size, _AT_ONCE)
    seen: dict[str, list[Shape]] = {}
    began = time.monotonic()
    for step, first in product(range(most), range(0, size, at_once)):
        batch = _read(task, batches, step, range(first, min(first + at_once, size)))
        for name, value in batch.items():
            shapes = seen.setdefault(name, [])
            shape = tuple(value.shape[1:])
            if first == 0:
                shapes.append(shape)
            elif shapes[-1] != shape:
                raise WorkloadError(
                    f"task {task.name!r}: field {name!r} has samples of several shapes in one batch: "
                    f"{shapes[-1]} and {shape}",
                    hint="Give the task a `collate` that pads them.",
                )
        differ = any(len(set(shapes)) > 1 for shapes in seen.values())
        if time.monotonic() - began > (_LOOK_AT_LENGTHS_S if differ else _LOOK_S):
            break
    return seen


def _read(
    task: Task | FlowTask, batches: Batches | StreamBatches, step: int, rows: range
) -> dict[str, Tensor]:
    try:
        return batches.rows(step, rows.start, rows.stop)
    except SpindleError:
        raise
    except Exception as error:  # code of the user's
        where = ", ".join((f"batch {step}", *getattr(error, "__notes__", ())))
        raise dataset_failure(task, where, error) from error


def _percentile(sizes: Sequence[int], percentile: float) -> int:
    """Return the nearest-rank percentile: the least size that so many percent of all are not above."""
    return sorted(sizes)[math.ceil(percentile / 100 * len(sizes)) - 1]


def varying_dims(lengths: TaskLengths | None) -> dict[str, tuple[bool, ...]]:
    """By field, which dimensions of a sample differ from batch to batch."""
    return {} if lengths is None else {name: field.varies for name, field in lengths.fields.items()}


def known_shapes(task: TaskGraph) -> dict[str, SampleShape]:
    """Return the shape of one sample of each field, as the task was traced with; None for what differs from
    batch to batch.
    """
    return {
        name: tuple(
            None if differs else size
            for size, differs in zip(
                spec.shape[1:], task.varying.get(name, (False,) * len(spec.shape[1:])), strict=True
            )
        )
        for name, spec in task.fields.items()
    }


def first_batch(task: TaskGraph, seed: int, samples: int) -> dict[str, Tensor]:
    """So many samples of a task's first batch, at the length that the task was traced with.

    Raises:
        WorkloadError: the dataset has no batch.
    """
    batch = open_batches(task.task, seed, varies=bool(task.varying)).rows(0, 0, samples)
    return at_shapes(batch, {name: task.fields[name].shape[1:] for name in task.varying})


def at_shapes(batch: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Return a batch whose named fields have these shapes of one sample: cut, or filled up with zeros.

    For what is looked at and never trained on.
    """
    return {
        name: _at_shape(value, shapes[name]) if name in shapes else value for name, value in batch.items()
    }


def _at_shape(value: Tensor, shape: Shape) -> Tensor:
    if tuple(value.shape[1:]) == shape:
        return value
    kept = value[(slice(None), *(slice(size) for size in shape))]
    made = torch.zeros((len(value), *shape), dtype=value.dtype)
    made[tuple(slice(size) for size in kept.shape)] = kept
    return made


T = TypeVar("T")


class LoaderWorkers:
    """A loader's worker processes: what each does first, given its number, and those that were started."""

    def __init__(self, begin: Callable[[int], None] | None = None) -> None:
        self.begin = begin
        self.processes: list[BaseProcess] = []


class Numbered(Protocol):
    """Batches of a map-style dataset, by number."""

    @property
    def task(self) -> Task | FlowTask: ...

    def rows(self, number: int, first: int, last: int, /) -> dict[str, Tensor]:
        """Samples [first, last) of a batch."""


def read_by_index(
    batches: Numbered, numbers: range, loading: Loading, make: Make[T], workers: LoaderWorkers | None = None
) -> Iterator[T]:
    """Yield what is made of each of these batches of a map-style dataset, in order."""
    yield from _started(_loader(_Numbered(batches, make), loading, workers, sampler=numbers), workers)


def read_stream(
    task: Task | FlowTask,
    seed: int,
    loading: Loading,
    make: Make[T],
    state: Mapping[str, Any] | None = None,
    workers: LoaderWorkers | None = None,
) -> Iterator[tuple[T, dict[str, Any]]]:
    """Yield what is made of each batch of a stream, without end: behind its last a stream is read anew. With
    it the place behind the batch, to go on from: JSON, the `state` to begin at.

    With several workers each reads its own part of the stream, and they take turns.

    Raises:
        WorkloadError: the stream has no batch, or none any more; or workers read the same samples.
    """
    epoch = 0 if state is None else int(state["epoch"])
    while True:
        loader = _loader(StreamPass(task, seed, epoch, make), loading, workers)
        has_batches = state is not None
        if state is not None:
            loader.load_state_dict(from_json(state["loader"]))
            state = None
        digests: set[str] = set()
        for made in _started(loader, workers):
            has_batches = True
            _require_other_samples(task, made.digest, digests)
            place = to_json(loader.state_dict(), task.name)
            yield made.made, {"epoch": epoch, "workers": loading.workers, "loader": place}
        if not has_batches:
            raise _ended(task, epoch)
        epoch += 1


def _started(loader: StatefulDataLoader, workers: LoaderWorkers | None) -> Iterator[Any]:
    """Yield the loader's items; its workers are told to `workers`."""
    iterator = iter(loader)
    if workers is not None:
        workers.processes = list(getattr(iterator, "_workers", ()))
    yield from iterator


def _require_other_samples(task: Task | FlowTask, digest: str | None, digests: set[str]) -> None:
    if digest in digests:
        raise WorkloadError(
            f"task {task.name!r}: several loader workers read the same samples of the stream",
            hint="Let its __iter__ give each its own part by torch.utils.data.get_worker_info(), or set "
            "`train: {loader: {workers: 1}}`.",
        )
    if digest is not None:
        digests.add(digest)


def _ended(task: Task | FlowTask, epoch: int) -> WorkloadError:
    if epoch == 0:
        return WorkloadError(
            f"task {task.name!r}: the stream ends before it has given a batch of {task.batch_size} samples",
            hint="Use a smaller batch_size, or give it more samples"
            " (with several loader workers each needs a batch of its own).",
        )
    return WorkloadError(
        f"task {task.name!r}: the stream has ended, and gives no batch of {task.batch_size} samples when it "
        f"is read again (pass {epoch + 1})",
        hint="Let its __iter__ begin anew each time, give it more samples, or train fewer steps.",
    )


class _Numbered(Dataset[T]):
    """Batches of a map-style dataset as its items."""

    def __init__(self, batches: Numbered, make: Make[T]) -> None:
        self._batches = batches
        self._make = make

    def __getitem__(self, number: int) -> T:
        made = self._make(lambda: self._batches.rows(number, 0, self._batches.task.batch_size))
        assert made is not None, "a map-style dataset has every batch"
        return made


def _loader(
    dataset: Dataset[Any],
    loading: Loading,
    workers: LoaderWorkers | None,
    sampler: Iterable[int] | None = None,
) -> StatefulDataLoader:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11, torch 2.13
        return StatefulDataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=loading.workers,
            prefetch_factor=loading.prefetch if loading.workers else None,
            worker_init_fn=None if workers is None else workers.begin,
            # Datasets need not be picklable, and what they have loaded is not loaded again.
            multiprocessing_context="fork" if loading.workers else None,
        )


class BatchSource(Protocol):
    """Where a task's batches come from.

    `draws`: whether reading them draws random numbers in this process. `state`: where a stream is behind the
    batch that was read last, to go on from.
    """

    @property
    def draws(self) -> bool:
        """Whether reading draws random numbers; see `Batches`."""

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
        """Return the shape of one sample of each field of a step's batch, whose rows were given last; of
        tasks whose sizes differ from batch to batch.
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
        """Return the shape of one sample of each field of a step's batch."""
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
    """Return a task's batches in this process; of a map-style dataset by no worker. `varies`: samples may
    have other sizes from batch to batch.

    Raises:
        WorkloadError: the dataset cannot be read, or has fewer samples than one batch.
    """
    if is_stream(task):
        return StreamBatches(task, seed, loading, workers)
    return Batches(task, seed, one_shape=not varies)


def first_samples(task: Task | FlowTask, count: int) -> dict[str, Tensor]:
    """Return a batch of the first `count` samples, or of all if there are fewer; the process's generators go
    on as if nothing had been drawn.

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
        length, before = num_samples(task), samples_by_index(task, count)
        try:
            with epochs.at(1):
                require_length(task, 1, length)
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
        for made in StreamPass(few, 0, 0, make):
            same_arguments(task, few)
            return made.made
    raise WorkloadError(f"task {task.name!r}: the dataset is empty", hint="Give it at least one batch.")
