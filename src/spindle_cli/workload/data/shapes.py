"""That all batches of a task have one shape: what is profiled, planned and sent is of that shape."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import product

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.data.kind import is_stream
from spindle_cli.workload.data.reading import StreamBatches
from spindle_cli.workload.graph import TaskGraph, WorkloadGraph
from spindle_cli.workload.training.batches import Batches, num_samples

# So many batches of each task are looked at, or as many as this takes seconds; where samples are put together
# one by one, so many of them at a time: a batch for hundreds of devices may be larger than this machine.
_BATCHES = 8
_LOOK_S = 1.0
_AT_ONCE = 256

Shape = tuple[int, ...]  # of one sample


def require_one_shape(graph: WorkloadGraph, seed: int) -> None:
    """Look at the first batches of every task, as training will take them.

    Raises:
        WorkloadError: naming a field that has other shapes than the graph's, with the longest that was seen;
            or a batch cannot be read.
    """
    for task in graph.tasks.values():
        if is_stream(task.task) or num_samples(task.task) >= task.task.batch_size:
            _look_at(task, seed)


def planned_shapes(task: TaskGraph) -> dict[str, Shape]:
    """Of one sample of each field, as the task was traced with."""
    return {name: spec.shape[1:] for name, spec in task.fields.items()}


def _look_at(task: TaskGraph, seed: int) -> None:
    planned = planned_shapes(task)
    seen: dict[str, set[Shape]] = {name: {shape} for name, shape in planned.items()}
    until = time.monotonic() + _LOOK_S
    batches = (
        StreamBatches(task.task, seed) if is_stream(task.task) else Batches(task.task, seed, one_shape=False)
    )
    size = task.task.batch_size
    at_once = min(size, _AT_ONCE) if task.task.collate is None and not is_stream(task.task) else size
    looked = 0
    for step, first in product(range(_BATCHES), range(0, size, at_once)):
        if looked and time.monotonic() >= until:
            break
        looked = step + 1
        for name, value in batches.rows(step, first, min(first + at_once, size)).items():
            seen.setdefault(name, set()).add(tuple(value.shape[1:]))
    for name in planned:
        if len(seen[name]) > 1:
            raise _varies(task, name, seen, looked)


def _varies(task: TaskGraph, name: str, seen: Mapping[str, set[Shape]], looked: int) -> WorkloadError:
    shapes = sorted(seen[name])
    shown = ", ".join([*map(str, shapes[:4]), *(["..."] if len(shapes) > 4 else [])])
    same_rank = len({len(shape) for shape in shapes}) == 1
    longest = tuple(map(max, zip(*shapes, strict=True))) if same_rank else max(shapes, key=len)
    return WorkloadError(
        f"task {task.task.name!r}: field {name!r} has other shapes from batch to batch: of one sample "
        f"{shown} in the first {looked} batches",
        hint="Plans are for one length: pad every batch to the same, in the dataset or in `collate`, with a "
        f"mask for what is padding. The longest seen here is {longest}; the dataset may have longer ones.",
    )
