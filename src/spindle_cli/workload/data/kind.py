"""Which way a task's dataset is read: by index, or one sample after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import FlowTask, Task


def is_stream(task: Task | FlowTask) -> bool:
    """Whether the dataset is read one sample after the other.

    Raises:
        WorkloadError: it makes batches by itself, can be read once only, or is no dataset at all.
    """
    dataset: Any = task.dataset
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader) or kind in ("DataLoader", "StatefulDataLoader", "WebLoader"):
        raise WorkloadError(
            f"task {task.name!r}: the dataset is a {kind}, which makes batches by itself",
            hint="Give its dataset, its collate_fn as the task's `collate`, and its workers as "
            "`train: {loader: {workers: N}}`: shuffling, batches and shares of devices are Spindle's.",
        )
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if isinstance(dataset, Iterator):
        raise WorkloadError(
            f"task {task.name!r}: the dataset is a {kind}, an iterator that can be read once only",
            hint="Give an iterable whose __iter__ begins anew each time, such as a class derived from "
            "torch.utils.data.IterableDataset.",
        )
    if hasattr(dataset, "__iter__"):
        return True
    raise WorkloadError(
        f"task {task.name!r}: the dataset is a {kind}, which has no length or no items by index",
        hint="Give a map-style dataset (__len__ and __getitem__(index)) or an iterable one (__iter__).",
    )
