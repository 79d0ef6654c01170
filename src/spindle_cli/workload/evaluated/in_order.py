"""A dataset read once, in its own order: what an evaluation takes."""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import partial
from typing import Any

from torch import Tensor

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.graph import ValueSpec
from spindle_cli.workload.training.absent import filled
from spindle_cli.workload.training.batches import collate, num_samples
from spindle_cli.workload.training.item_draws import SeededCalls, generators_kept
from spindle_cli.workload.types import FlowTask, Task


class InOrder:
    """Batches of a task's `batch_size` in the dataset's order; the last may have fewer samples.

    What an item draws follows from the seed and its index, in every evaluation alike.
    """

    def __init__(self, task: Task | FlowTask, dataset: Any, seed: int, fields: dict[str, ValueSpec]) -> None:
        """`task`: with `dataset` in place of its own. `fields`: as it was trained with.

        Raises:
            WorkloadError: the dataset is not map-style, or has no samples.
        """
        self._task = task
        self._dataset = dataset
        self._fields = fields
        self._reads = SeededCalls(seed, task.name, "sample")
        self._collates = SeededCalls(seed, task.name, "batch")
        self.num_samples = num_samples(task)
        if self.num_samples == 0:
            raise WorkloadError(
                f"task {task.name!r}: the dataset to evaluate it on is empty", hint="Give it samples."
            )

    @property
    def num_batches(self) -> int:
        """The last may not be full."""
        return -(-self.num_samples // self._task.batch_size)

    def size(self, number: int) -> int:
        """Samples of a batch."""
        return min(self._task.batch_size, self.num_samples - number * self._task.batch_size)

    def rows(self, number: int, first: int, last: int, fields: Collection[str]) -> dict[str, Tensor]:
        """Samples [first, last) of a batch, collated; only the named fields.

        Raises:
            WorkloadError: items cannot be collated, or have other fields or shapes than those trained on.
            Exception: whatever the dataset raised, with a note of the samples.
        """
        whole = self._task.collate is not None  # it may pad, or mix samples
        begin = number * self._task.batch_size
        start, stop = (0, self.size(number)) if whole else (first, last)
        with generators_kept():
            try:
                items = [self._item(index) for index in range(begin + start, begin + stop)]
                batch = self._collates.call(partial(collate, self._task, items), 0, number)
            except Exception as error:
                error.add_note(
                    f"while loading samples {begin + start} to {begin + stop - 1} of the dataset that task "
                    f"{self._task.name!r} is evaluated on"
                )
                raise
        found = {name: self._checked(name, batch) for name in fields}
        return {name: field[first:last] for name, field in found.items()} if whole else found

    def _item(self, index: int) -> Any:
        item = self._reads.call(partial(operator.getitem, self._dataset, index), 0, index)
        return filled(self._task.name, self._task.absent, item)

    def _checked(self, name: str, batch: dict[str, Tensor]) -> Tensor:
        task, wanted = self._task.name, self._fields[name]
        if name not in batch:
            raise WorkloadError(
                f"task {task!r}: the dataset to evaluate it on gives no field {name!r}",
                hint="Its items need the fields of the dataset that the task is trained on.",
            )
        shape = tuple(batch[name].shape[1:])
        if shape != wanted.shape[1:] or batch[name].is_floating_point() != wanted.dtype.is_floating_point:
            raise WorkloadError(
                f"task {task!r}: field {name!r} of the dataset to evaluate it on has shape {shape} and dtype "
                f"{batch[name].dtype} for a sample; it is trained on {wanted.shape[1:]} and {wanted.dtype}",
                hint="Pad, crop or convert it to what the task is trained on.",
            )
        return batch[name]
