"""The batches of a task: which samples each step takes, and their tensors.

Samples that lack a field, such as an image that is not there: what stands in its place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from spindle_cli.errors import WorkloadError
from spindle_cli.training.items import Epochs, SeededCalls, generators_kept, no_draws, seed_of
from spindle_cli.workload.arguments import (
    arguments_of,
    as_text,
    fields_of,
    lengths_of_lists,
)
from spindle_cli.workload.refuse import place_of_error, refusal
from spindle_cli.workload.types import FlowTask, Task

_HINT = "An item has the field as `absent` has it, in shape and dtype, or not at all."


def presence_of(field: str) -> str:
    """Name of the field that says whether a sample has another."""
    return f"has_{field}"


def filled(task: str, absent: Mapping[str, Tensor], item: Any) -> Any:
    """Return a dataset's item with every field of `absent`, and beside each whether the item has it by
    itself.

    Without `absent` any item is as it is.

    Raises:
        WorkloadError: the item is no dict, says by itself whether it has a field, or has one of another shape
            or dtype than what would stand in its place.
    """
    if not absent:
        return item
    if not isinstance(item, Mapping):
        raise WorkloadError(
            f"task {task!r}: an item is a {type(item).__name__}, expected a dict of fields",
            hint="Fields that some samples lack (`absent`) are told by their names.",
        )
    whole = dict(item)
    for name, stand_in in absent.items():
        presence = presence_of(name)
        if presence in item:
            raise WorkloadError(
                f"task {task!r}: an item has the field {presence!r}, which tells whether it has {name!r}",
                hint="Leave it out: Spindle adds it for every field of `absent`.",
            )
        value = item.get(name)
        whole[name] = stand_in if value is None else _alike(task, name, value, stand_in)
        whole[presence] = torch.tensor(value is not None)
    return whole


def _alike(task: str, name: str, value: Any, stand_in: Tensor) -> Tensor:
    try:
        there = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WorkloadError(
            f"task {task!r}: an item has {name!r} as a {type(value).__name__}, expected a tensor", hint=_HINT
        ) from error
    if there.shape != stand_in.shape or there.dtype != stand_in.dtype:
        raise WorkloadError(
            f"task {task!r}: an item has {name!r} as {_described(there)}, and `absent` has it as "
            f"{_described(stand_in)}",
            hint=_HINT,
        )
    return there


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


SampleShape = tuple[int | None, ...]  # None: a size that differs from batch to batch


@dataclass(frozen=True)
class _Calls:
    """How a task's dataset and its collate are called: what, and of which sample or batch; `may_draw`: random
    numbers.
    """

    read: Callable[..., Any]
    collate: Callable[..., dict[str, Tensor]]
    may_draw: bool = True


def _call(read: Callable[[], Any], *_: object) -> Any:
    return read()


class Batches:
    """A task's batches, shuffled per epoch from the seed and independent of any plan.

    Every field of a sample comes from the same dataset item. What an item draws follows from the seed, the
    task, the epoch and the sample, whoever reads it (items.py). The samples that do not fill a last
    batch are left out of their epoch (and are shuffled into the next).
    """

    state: dict[str, Any] | None = None  # a stream's; which samples a step takes here follows from the step

    def __init__(
        self,
        task: Task | FlowTask,
        seed: int,
        shapes: Mapping[str, SampleShape] | None = None,
        *,
        one_shape: bool = True,
        whole: bool = True,
    ) -> None:
        """`shapes`: of one sample, by field, that batches must have; of others the first batch's, unless
        `one_shape` is False. Where sizes differ from batch to batch, whole batches are
        collated, unless `whole` is False.

        Raises:
            WorkloadError: the dataset is not map-style, or holds fewer samples than one batch.
        """
        self.task = task
        self.seed = seed
        self.num_samples = num_samples(task)
        self.steps_per_epoch = self.num_samples // task.batch_size
        self._epochs = Epochs(task, seed)
        self._reads = SeededCalls(seed, task.name, "sample")
        self._collates = SeededCalls(seed, task.name, "batch")
        self._order: tuple[int, np.ndarray[Any, Any]] | None = None  # epoch, and the samples in its order
        self._shapes = SampleShapes(task.name, shapes) if one_shape else None
        differ = not one_shape or any(None in shape for shape in (shapes or {}).values())
        self._varies = differ and whole
        # Where sizes differ, the last whole batch and its step: of the thread that draws, and of the other.
        self._held: dict[bool, tuple[int, dict[str, Tensor]]] = {}
        if self.steps_per_epoch == 0:
            raise WorkloadError(
                f"task {task.name!r}: the dataset has {self.num_samples} samples, "
                f"fewer than one batch of {task.batch_size}",
                hint="Use a smaller batch_size or a larger dataset.",
            )

    @property
    def has_epochs(self) -> bool:
        """Whether samples may be others in another epoch (training/items.py)."""
        return bool(self._epochs.told)

    @property
    def draws(self) -> bool:
        """Whether an item, a batch or set_epoch has drawn random numbers so far."""
        return self._reads.draws or self._collates.draws or self._epochs.draws

    def indices(self, step: int) -> list[int]:
        """Dataset indices of the samples of a step (counted from 0), `batch_size` of them."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = self._order
        if order is None or order[0] != epoch:
            generator = torch.Generator().manual_seed(seed_of(self.seed, self.task.name, epoch))
            whole = torch.randperm(self.num_samples, generator=generator).numpy()
            # A list of so many numbers would take nine times as much memory, on every rank.
            order = self._order = epoch, whole.astype(np.int32) if self.num_samples < 2**31 else whole
        first = position * self.task.batch_size
        indices: list[int] = order[1][first : first + self.task.batch_size].tolist()
        return indices

    def rows(
        self, step: int, first: int, last: int, fields: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Samples [first, last) of a step's batch, collated; only the named fields if given.

        For the only thread of the process that draws random numbers: its generators are seeded meanwhile.

        Raises:
            WorkloadError: items cannot be collated into tensors whose first dimension is the sample, or a
                sample's shape differs from those before.
        """
        with generators_kept():
            return self._rows(step, (first, last), fields, _Calls(self._reads.call, self._collates.call))

    def rows_without_draws(
        self, step: int, first: int, last: int, fields: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Return what `rows` gives, for a thread beside others.

        Raises:
            WorkloadError: as `rows`.
            DrawsError: random numbers are drawn.
        """
        with no_draws():
            return self._rows(step, (first, last), fields, _Calls(_call, _call, may_draw=False))

    def _rows(
        self, step: int, rows: tuple[int, int], fields: Collection[str] | None, calls: _Calls
    ) -> dict[str, Tensor]:
        first, last = rows
        if self._varies:
            whole = self._whole(step, calls)
            batch = {name: value[first:last] for name, value in whole.items()}
        elif self.task.collate is None:
            # What nobody reads need not be put into a batch; a collate of the user's may need all of it.
            arguments = arguments_of(self.task)
            only = fields if arguments is not None and arguments.are_fields else None
            with self._at(step, calls):
                items = [_only(item, only) for item in self._items(step, rows, calls)]
            batch = collate(self.task, items, whole=only is None or not all(map(_has_names, items)))
        else:
            batch = self._collated_rows(step, rows, calls)
        if self._shapes is not None:
            self._shapes.require({name: tuple(value.shape[1:]) for name, value in batch.items()})
        return batch if fields is None else {name: batch[name] for name in fields}

    def _collated_rows(self, step: int, rows: tuple[int, int], calls: _Calls) -> dict[str, Tensor]:
        """Let the user's collate make some rows of a batch: of their items alone where it gives the same so,
        and else of all items.
        """
        every = (0, self.task.batch_size)
        if rows == every or self._collates_shares:
            batch = self._collated(step, rows, calls)
            if rows == every or not self._collates.draws:
                return batch
        first, last = rows
        return {name: value[first:last] for name, value in self._collated(step, every, calls).items()}

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of one sample of each field of a step whose rows were given last, where sizes
        differ.
        """
        whole = next(batch for number, batch in self._held.values() if number == step)
        return {name: tuple(value.shape[1:]) for name, value in whole.items()}

    def _whole(self, step: int, calls: _Calls) -> dict[str, Tensor]:
        """Return a step's batch: its longest sample is the same for whoever takes some of its rows."""
        draws = calls.read is not _call
        if self._held.get(draws, (None,))[0] != step:
            self._held[draws] = step, self._collated(step, (0, self.task.batch_size), calls)
        return self._held[draws][1]

    @cached_property
    def _collates_shares(self) -> bool:
        """Whether the task's own collate makes of some samples what they are in the whole batch.

        Tried on the first batch, so that all ranks find the same. Else (it draws, pads to the longest, mixes
        samples) every rank collates the whole batch and takes its rows.
        """
        reads = SeededCalls(self.seed, self.task.name, "sample")
        collates = SeededCalls(self.seed, self.task.name, "batch")
        calls = _Calls(reads.call, collates.call)
        size = self.task.batch_size
        cuts = sorted({0, 1, size // 2, size})
        with generators_kept():
            whole = self._collated(0, (0, size), calls)
            for first, last in pairwise(cuts):
                try:
                    share = self._collated(0, (first, last), calls)
                except WorkloadError:
                    return False  # it takes whole batches alone
                if not same_batch(share, {name: value[first:last] for name, value in whole.items()}):
                    return False
        return not collates.draws

    def _items(self, step: int, rows: tuple[int, int], calls: _Calls) -> list[Any]:
        epoch, task = step // self.steps_per_epoch, self.task

        def item(index: int) -> Any:
            try:
                return calls.read(partial(operator.getitem, task.dataset, index), epoch, index)
            except Exception as error:
                error.add_note(f"at sample {index} of the dataset")
                raise

        return [filled(task.name, task.absent, item(index)) for index in self.indices(step)[slice(*rows)]]

    def _collated(self, step: int, rows: tuple[int, int], calls: _Calls) -> dict[str, Tensor]:
        with self._at(step, calls):
            items = self._items(step, rows, calls)
            return calls.collate(partial(collate, self.task, items), *divmod(step, self.steps_per_epoch))

    @contextmanager
    def _at(self, step: int, calls: _Calls) -> Iterator[None]:
        """Inside the data are those of a step's epoch."""
        epoch = step // self.steps_per_epoch
        with self._epochs.at(epoch, may_draw=calls.may_draw):
            if self.has_epochs:
                require_length(self.task, epoch, self.num_samples)
            yield


class SampleShapes:
    """The shapes of one sample of a task's fields, which all batches have."""

    def __init__(self, task: str, profiled: Mapping[str, SampleShape] | None = None) -> None:
        """`profiled`: those that the task was profiled with; None for a size that differs."""
        self._task = task
        self._expected: dict[str, SampleShape] = dict(profiled or {})

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Take a batch's, by field.

        Raises:
            WorkloadError: one has another shape than those before.
        """
        for name, shape in shapes.items():
            expected = self._expected.setdefault(name, shape)
            if not _fits(shape, expected):
                shown = tuple("any" if size is None else size for size in expected)
                raise WorkloadError(
                    f"task {self._task!r}: field {name!r} has other shapes from batch to batch: "
                    f"({', '.join(map(str, shown))}{',' * (len(shown) == 1)}) and {shape} per sample",
                    hint="`spindle profile` had not seen that: let it look at more batches (--batches), so "
                    "that the plan is for batches of several lengths; or pad to one length, with a mask for "
                    "what is padding.",
                )


def _fits(shape: tuple[int, ...], expected: SampleShape) -> bool:
    return len(shape) == len(expected) and all(
        size in (None, length) for length, size in zip(shape, expected, strict=True)
    )


def _only(item: Any, fields: Collection[str] | None) -> Any:
    if fields is None or not _has_names(item):
        return item
    return {name: value for name, value in item.items() if name in fields}


def _has_names(item: Any) -> bool:
    return isinstance(item, dict)


def samples_by_index(task: Task | FlowTask, count: int) -> dict[str, Tensor]:
    """Return a batch of the first `count` samples, or of all if there are fewer; inside of `generators_kept`.

    Raises:
        WorkloadError: they are no batch.
    """
    reads, collates = (SeededCalls(0, task.name, what) for what in ("sample", "batch"))

    def item(index: int) -> Any:
        try:
            sample = reads.call(partial(operator.getitem, task.dataset, index), 0, index)
        except Exception as error:  # code of the user's
            raise dataset_failure(task, f"sample {index}", error) from error
        return filled(task.name, task.absent, sample)

    with Epochs(task, 0).at(0):
        items = [item(index) for index in range(min(count, num_samples(task)))]
        if not items:
            raise WorkloadError(
                f"task {task.name!r}: the dataset is empty", hint="Give it at least one batch."
            )
        return collates.call(partial(collate, task, items), 0, 0)


def require_same(task: Task | FlowTask, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return what is read, if it is the same the second time.

    Raises:
        WorkloadError: naming the field that is another.
    """
    batch, again = read(), read()
    for name, value in batch.items():
        if name not in again or not _is_same(value, again[name]):
            raise WorkloadError(
                f"task {task.name!r}: field {name!r} is another each time that the same sample is read, "
                "although torch's, numpy's and Python's generators start from the same seed",
                hint="Draw with torch, numpy.random or random and no generator that the dataset keeps or "
                "seeds by itself: Spindle seeds these for every sample, alike on all devices.",
            )
    return batch


def same_batch(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether two batches have the same fields with the same values."""
    return first.keys() == second.keys() and all(_is_same(first[name], second[name]) for name in first)


def _is_same(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first, second) or bool(
        ((first == second) | ((first != first) & (second != second))).all()
    )


def num_samples(task: Task | FlowTask) -> int:
    """Length of the task's dataset, in its first epoch.

    Raises:
        WorkloadError: it is not a map-style dataset.
    """
    if not hasattr(task.dataset, "__len__") or not hasattr(task.dataset, "__getitem__"):
        raise WorkloadError(
            f"task {task.name!r}: the dataset is a {type(task.dataset).__name__}, "
            "which has no length or no items by index",
            hint="Give a map-style dataset: __len__ and __getitem__(index).",
        )
    try:
        with generators_kept(), Epochs(task, 0).at(0):
            return len(task.dataset)
    except Exception as error:  # code of the user's
        raise dataset_failure(task, "its length", error) from error


def require_length(task: Task | FlowTask, epoch: int, expected: int) -> None:
    """Refuse a dataset that has another length in this epoch, which it was told of, than in its first.

    Raises:
        WorkloadError: it has.
    """
    count = len(task.dataset)
    if count != expected:
        raise WorkloadError(
            f"task {task.name!r}: the dataset has {count} samples after set_epoch({epoch}), and {expected} "
            "after set_epoch(0): which samples a step takes could not be told from the step",
            hint="Let it have as many in every epoch (which ones these are may follow from the epoch), or "
            "give a stream (torch.utils.data.IterableDataset), each pass of which may have another length.",
        )


def dataset_failure(task: Task | FlowTask, what: str, error: Exception) -> WorkloadError:
    """Return what a task's dataset has raised when it was asked for `what`, as a refusal that names the
    place.
    """
    text = str(error).split("\n")[0]
    failed = f"the dataset fails to give {what}: {type(error).__name__}: {text}"
    return refusal(
        task.name, failed, place_of_error(error), hint="A dataset has a length and items by index."
    )


def collate(task: Task | FlowTask, items: list[Any], *, whole: bool = True) -> dict[str, Tensor]:
    """A batch from dataset items, as a dict of its fields (see `fields_of`). `whole`: with all of them.

    Raises:
        WorkloadError: forward does not take it, or it is not made of tensors whose first dimension is the
            sample, or these have no values, or ask for gradients.
    """
    if task.collate is None:
        _require_alike(task, items)
        # Asked before torch puts them together, which in a worker's process it cannot.
        items = [_collatable(task, item) for item in items]
    try:
        batch = (task.collate or default_collate)(items)
    except Exception as error:  # code of the user's, or what torch finds of the items
        raise _of_collate(task, error) from error
    if task.collate is not None and arguments_of(task) is None:
        _require_no_lists_of_samples(task, items, batch)
    fields = fields_of(task, batch) if whole else batch
    for name, value in fields.items():
        _check_field(task, name, value, len(items))
    return dict(fields)


def _require_no_lists_of_samples(task: Task | FlowTask, items: list[Any], batch: Any) -> None:
    """Refuse a collate that leaves samples in a list: what is made of fewer has a shorter one."""
    lengths, count = tuple(lengths_of_lists(batch)), len(items)
    if count == 1 or count not in lengths:
        return
    try:
        fewer = (task.collate or default_collate)(items[:-1])
    except Exception as error:  # code of the user's
        raise _of_collate(task, error) from error
    if tuple(lengths_of_lists(fewer)) != lengths:
        raise WorkloadError(
            f"task {task.name!r}: its collate gives a list with an entry for each sample, which devices that "
            "take some of the samples cannot cut",
            hint="Stack them in the collate: a tensor's first dimension is the sample. What differs in size "
            "(boxes of an image) is padded to one size, with a mask for what is padding.",
        )


def _collatable(task: Task | FlowTask, item: Any) -> Any:
    """Return an item as torch's default_collate takes it."""
    if isinstance(item, Mapping):
        for name, value in item.items():
            _require_constant(task, name, value)
        if all(type(value) is Tensor for value in item.values()):
            return item
        return {name: as_text(value) for name, value in item.items()}
    if isinstance(item, tuple | list):
        for number, value in enumerate(item):
            _require_constant(task, number, value)
        made = map(as_text, item)
        return type(item)(*made) if hasattr(item, "_fields") else type(item)(made)
    return item


def _of_collate(task: Task | FlowTask, error: Exception) -> WorkloadError:
    text = str(error).split("\n")[0]
    failed = "the dataset's items cannot be put into one batch: "
    if task.collate is None:
        hint = "Give all items the same keys with tensors of the same shapes, or the task a `collate`."
        return refusal(task.name, f"{failed}{text}", None, hint=hint)
    failed += f"its collate raises {type(error).__name__}: {text}"
    hint = "A collate gets a list of items, one or more, and gives a dict of tensors."
    return refusal(task.name, failed, place_of_error(error), hint=hint)


def _require_alike(task: Task | FlowTask, items: list[Any]) -> None:
    """Refuse items of which some have None where others have a value: by the first, all would have none."""
    entries = _entries_of(items)
    missing = {key for key, value in entries if value is None}
    for key, value in entries if missing else ():
        if value is not None and key in missing:
            entry = f"entry {key}" if isinstance(key, int) else repr(key)
            raise refusal(
                task.name,
                f"the dataset's items cannot be put into one batch: {entry} is None in some of them and a "
                "value in others",
                None,
                hint="Let items be dicts, and say what stands in its place: Task(..., absent={'image': "
                "torch.zeros(3, 224, 224)}); read `has_image`. Or give the task a `collate`.",
            )


def _entries_of(items: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return keys and values of items that are all dicts, or all tuples or lists; nothing of others."""
    if all(isinstance(item, Mapping) for item in items):
        return [pair for item in items for pair in item.items()]
    if all(isinstance(item, tuple | list) for item in items):
        return [pair for item in items for pair in enumerate(item)]
    return []


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
    _require_constant(task, name, value)


def _require_constant(task: Task | FlowTask, name: Any, value: Any) -> None:
    """Refuse what asks for a gradient, which no sample takes, or has no values."""
    if isinstance(value, Tensor) and value.requires_grad:
        raise WorkloadError(
            f"task {task.name!r}: field {name!r} of the dataset's items requires gradients, which end at the "
            "dataset",
            hint="Give x.detach(), or compute it under torch.no_grad(). What is trained belongs into "
            "forward; a forward that takes gradients by a field calls x.requires_grad_() itself.",
        )
    if isinstance(value, Tensor) and value.is_meta:
        raise WorkloadError(
            f"task {task.name!r}: field {name!r} of the dataset's items has no values: the dataset computes "
            "it with parameters, which have none where the workload is only looked at",
            hint="Compute it beforehand, make the module when the first item is read, or call it in forward.",
        )
