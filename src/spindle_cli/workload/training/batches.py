"""The batches of a task: which samples each step takes, and their tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import FlowTask, Task


class Batches:
    """A task's batches, shuffled per epoch from the seed and independent of any plan.

    Every field of a sample comes from the same dataset item. The samples that do not fill a last batch are
    left out of their epoch (and are shuffled into the next).
    """

    def __init__(self, task: Task | FlowTask, seed: int) -> None:
        """Raises WorkloadError: the dataset is not map-style, or holds fewer samples than one batch."""
        self.task = task
        self.seed = seed
        self.num_samples = num_samples(task)
        self.steps_per_epoch = self.num_samples // task.batch_size
        self._epoch: int | None = None
        self._order: list[int] = []
        self._shapes: dict[str, tuple[int, ...]] = {}  # of one sample, by field
        if self.steps_per_epoch == 0:
            raise WorkloadError(
                f"task {task.name!r}: the dataset has {self.num_samples} samples, "
                f"fewer than one batch of {task.batch_size}",
                hint="Use a smaller batch_size or a larger dataset.",
            )

    def indices(self, step: int) -> list[int]:
        """Dataset indices of the samples of a step (counted from 0), `batch_size` of them."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(_epoch_seed(self.seed, self.task.name, epoch))
            self._order = torch.randperm(self.num_samples, generator=generator).tolist()
            self._epoch = epoch
        first = position * self.task.batch_size
        return self._order[first : first + self.task.batch_size]

    def rows(
        self, step: int, first: int, last: int, fields: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Samples [first, last) of a step's batch, collated; only the named fields if given.

        Raises:
            WorkloadError: items cannot be collated into tensors whose first dimension is the sample, or a
                sample's shape differs from those before.
        """
        items = [self.task.dataset[index] for index in self.indices(step)[first:last]]
        if fields is not None and self.task.collate is None:
            # What nobody reads need not be put into a batch; a collate of the user's may need all of it.
            items = [_only(item, fields) for item in items]
        batch = collate(self.task, items)
        self._check_shapes(batch)
        return batch if fields is None else {name: batch[name] for name in fields}

    def _check_shapes(self, batch: dict[str, Tensor]) -> None:
        for name, value in batch.items():
            shape, known = tuple(value.shape[1:]), self._shapes.setdefault(name, tuple(value.shape[1:]))
            if shape != known:
                raise WorkloadError(
                    f"task {self.task.name!r}: field {name!r} has other shapes from batch to batch: "
                    f"{known} and {shape} per sample",
                    hint="Pad to one length in the dataset or in `collate`, with a mask for what is padding.",
                )


def _only(item: Any, fields: Collection[str]) -> Any:
    if not isinstance(item, dict):
        return item
    return {name: value for name, value in item.items() if name in fields}


def num_samples(task: Task | FlowTask) -> int:
    """Length of the task's dataset.

    Raises:
        WorkloadError: it is not a map-style dataset.
    """
    if not hasattr(task.dataset, "__len__") or not hasattr(task.dataset, "__getitem__"):
        raise WorkloadError(
            f"task {task.name!r}: the dataset is a {type(task.dataset).__name__}, "
            "which has no length or no items by index",
            hint="Give a map-style dataset: __len__ and __getitem__(index).",
        )
    return len(task.dataset)


def collate(task: Task | FlowTask, items: list[Any]) -> dict[str, Tensor]:
    """A batch from dataset items.

    Raises:
        WorkloadError: it is not a dict of tensors whose first dimension is the sample.
    """
    try:
        batch = (task.collate or default_collate)(items)
    except (TypeError, RuntimeError, KeyError, ValueError) as error:
        text = str(error).split("\n")[0]
        raise WorkloadError(
            f"task {task.name!r}: the dataset's items cannot be put into one batch: {text}",
            hint="Give all items the same keys with tensors of the same shapes, or the task a `collate`.",
        ) from error
    if not isinstance(batch, dict):
        raise WorkloadError(
            f"task {task.name!r}: a batch is a {type(batch).__name__}, expected a dict from names to tensors",
            hint="Let the dataset's items be dicts whose keys are the names of forward's arguments.",
        )
    for name, value in batch.items():
        _check_field(task, name, value, len(items))
    return dict(batch)


def _check_field(task: Task | FlowTask, name: Any, value: Any, count: int) -> None:
    if not isinstance(value, Tensor):
        raise WorkloadError(
            f"task {task.name!r}: field {name!r} of a batch is a {type(value).__name__}, expected a tensor",
            hint="Turn it into a tensor in the dataset or in `collate`, or leave it out of the items.",
        )
    if value.dim() == 0 or value.shape[0] != count:
        raise WorkloadError(
            f"task {task.name!r}: field {name!r} of a batch of {count} samples has shape "
            f"{tuple(value.shape)}, expected {count} as its first dimension",
            hint="A batch's first dimension is the sample.",
        )


def _epoch_seed(seed: int, task: str, epoch: int) -> int:
    digest = hashlib.sha256(f"{seed}/{task}/{epoch}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
