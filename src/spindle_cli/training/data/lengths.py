"""Which shapes the batches of a task have: found before the workload is traced, profiled and planned for."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from spindle_cli.errors import SpindleError, WorkloadError
from spindle_cli.training.batches import Batches, SampleShape, dataset_failure, num_samples
from spindle_cli.training.data.reading import StreamBatches, first_samples, open_batches, require_epochs
from spindle_cli.training.data.streams import is_stream
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.settings.types import FieldLengths, Looking, TaskLengths
from spindle_cli.workload.types import FlowTask, Task, Workload

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
