"""A workload as each of several islands trains it (`train.local_sgd`): on its part of every batch."""

from __future__ import annotations

from dataclasses import replace

from torch.utils.data import IterableDataset

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.types import FlowTask, Task, Workload


def as_on_an_island(workload: Workload, train: TrainSettings, where: str) -> Workload:
    """Give a workload's modules in tasks with an island's part of their batches; without islands, the
    workload itself.

    An island's part of a batch is a batch by itself: of the batches of this size, in their order, the islands
    take one each. So a loss is the mean over an island's part.

    Raises:
        WorkloadError: a batch cannot be divided, or a task cannot be trained so.
    """
    asked = train.local_sgd
    if asked is None:
        return workload
    tasks = []
    for task in workload.tasks:
        _require_divisible(task, train, asked.islands, where)
        tasks.append(replace(task, batch_size=task.batch_size // asked.islands))
    return replace(workload, tasks=tasks)


def _require_divisible(task: Task | FlowTask, train: TrainSettings, islands: int, where: str) -> None:
    named = f"{where}: task {task.name!r}"
    if task.batch_size % islands:
        raise WorkloadError(
            f"{named}: its batch of {task.batch_size} samples cannot be divided between {islands} islands "
            "(train.local_sgd)",
            hint=f"Make batch_size a multiple of {islands}: islands take equal parts.",
        )
    if task.reduction == "sum":
        raise WorkloadError(
            f"{named}: its loss is a sum over the batch (reduction='sum'), which does not go with "
            "train.local_sgd: an island's part of the batch has a smaller one",
            hint="Let the task give the mean over its samples.",
        )
    is_stream = isinstance(task.dataset, IterableDataset) or not hasattr(task.dataset, "__getitem__")
    if is_stream or train.loader.of(task.name).workers:
        what = "its dataset is iterable" if is_stream else "it has loader workers (train.loader)"
        raise WorkloadError(
            f"{named}: {what}, which does not go with train.local_sgd: islands take every so many-th batch",
            hint="Give it a map-style dataset, and workers: 0.",
        )
