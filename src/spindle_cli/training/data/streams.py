"""Iterable datasets: the batches of one pass over a stream, with what their samples draw, and where it is.

A stream's order is its own. What is read at a place draws the same whoever reads it, as items of map-style
datasets do (training/items.py): each sample is asked for from a seed that follows from the training
seed, the task, the epoch, the loader's worker, and how many samples this one has asked for.

Which way a task's dataset is read: by index, or one sample after the other.

What a few samples of a dataset are, so that one that has changed is noticed before a run goes on.

States of datasets as JSON, so that a checkpoint can have them: nothing here is pickled.
"""

from __future__ import annotations

import base64
import hashlib
import operator
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from spindle_cli.errors import WorkloadError
from spindle_cli.files.request import SeenData
from spindle_cli.training.batches import collate, filled, num_samples
from spindle_cli.training.items import Epochs, SeededCalls, generators_kept
from spindle_cli.units import format_seconds
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


_TAG = "spindle:"


def to_json(value: Any, task: str) -> Any:
    """Return a state as JSON.

    Raises:
        WorkloadError: it has something else than dicts with texts or numbers as keys, lists, tuples, texts,
            bytes, numbers, tensors and arrays.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        return _dict_as_json(value, task)
    if isinstance(value, list):
        return [to_json(entry, task) for entry in value]
    if isinstance(value, tuple):
        return {f"{_TAG}tuple": [to_json(entry, task) for entry in value]}
    if isinstance(value, bytes):
        return {f"{_TAG}bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return {f"{_TAG}tensor": to_json(value.detach().cpu().numpy(), task)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {f"{_TAG}array": [value.dtype.str, list(value.shape), data]}
    raise WorkloadError(
        f"task {task!r}: its dataset's state_dict() has a {type(value).__name__}, which no checkpoint "
        "can have",
        hint="Let it have numbers, texts, bytes, tensors, arrays, lists and dicts alone; or leave "
        "state_dict out: then the stream is read from its beginning to go on.",
    )


def _dict_as_json(value: Mapping[str | int, Any], task: str) -> dict[str, Any]:
    """Return a dict as JSON: as pairs, where a key is no text, or could be taken for a tag."""
    pairs = [[key, to_json(entry, task)] for key, entry in value.items()]
    if all(isinstance(key, str) and not key.startswith(_TAG) for key in value):
        return {str(key): entry for key, entry in pairs}
    return {f"{_TAG}dict": pairs}


def from_json(value: Any) -> Any:
    """Return the state that `to_json` has made this of."""
    if isinstance(value, list):
        return [from_json(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) == 1 and tag in _READERS:
        return _READERS[tag](value[tag])
    return {key: from_json(entry) for key, entry in value.items()}


def _array(dtype: str, shape: Sequence[int], data: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()


_READERS: Mapping[str, Callable[[Any], Any]] = {
    f"{_TAG}dict": lambda pairs: {key: from_json(entry) for key, entry in pairs},
    f"{_TAG}tuple": lambda entries: tuple(map(from_json, entries)),
    f"{_TAG}bytes": base64.b64decode,
    f"{_TAG}tensor": lambda array: torch.from_numpy(from_json(array)),
    f"{_TAG}array": lambda array: _array(*array),
}


UNREADABLE = "unreadable"  # in place of a digest: whoever trains on the sample says why


class Digest(Protocol):
    """A hash of hashlib's."""

    def update(self, content: bytes, /) -> None:
        """Add bytes to what is hashed."""


def look_at(task: Task | FlowTask, indices: Collection[int] | None = None) -> SeenData:
    """Return a dataset's length, and digests of its first and last sample and two between, or of those named,
    in its first epoch; of a stream, one of its first sample.

    What a sample draws it draws here from the same seed each time; the process's generators go on as if
    nothing had been drawn.

    Raises:
        WorkloadError: it cannot be read.
    """
    if is_stream(task):
        return _look_at_stream(task)
    count = num_samples(task)
    reads = SeededCalls(0, task.name, "sample")

    def digest(index: int) -> str:
        try:
            return digest_of(reads.call(partial(operator.getitem, task.dataset, index), 0, index))
        except Exception:  # anything that code of the user's raises
            return UNREADABLE

    with generators_kept(), Epochs(task, 0).at(0):
        usual = {0, count // 3, 2 * count // 3, count - 1} if count else ()
        chosen = sorted(usual if indices is None else indices)
        return SeenData(num_samples=count, samples={index: digest(index) for index in chosen})


def _look_at_stream(task: Task | FlowTask) -> SeenData:
    reads = SeededCalls(0, task.name, "sample")
    with generators_kept():
        try:
            first = reads.call(lambda: next(iter(task.dataset), None))
        except Exception:  # anything that code of the user's raises
            return SeenData(num_samples=None, samples={0: UNREADABLE})
        return SeenData(num_samples=None, samples={0: digest_of(first)})


def changes(before: SeenData, now: SeenData) -> tuple[str, ...]:
    """Return how a dataset differs from what it was, for people; nothing: in nothing that was looked at."""
    if before.num_samples is None or now.num_samples is None:
        if before.num_samples != now.num_samples:
            was, is_ = ("by index", "as a stream") if now.num_samples is None else ("as a stream", "by index")
            return (f"it was read {was}, and is {is_} now",)
    elif before.num_samples != now.num_samples:
        return (f"it had {before.num_samples:,} samples, and has {now.num_samples:,} now",)
    return tuple(
        f"sample {index:,} is another than it was"
        for index, digest in now.samples.items()
        if before.samples.get(index, digest) != digest
    )


def digest_of(item: Any) -> str:
    """Return a digest of an item's values. Of types that are neither tensors, arrays, numbers and texts nor
    made of them, it knows the type alone.
    """
    digest = hashlib.sha256()
    _put(digest, item)
    return digest.hexdigest()[:32]


def _put(digest: Digest, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        if not value.is_meta:
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"array {value.dtype} {value.shape};".encode())
        digest.update(value.tobytes() if value.dtype != object else b"")
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for key, entry in value.items():
            _put(digest, key)
            _put(digest, entry)
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)};".encode())
        for entry in value:
            _put(digest, entry)
    elif isinstance(value, bytes | str | int | float | complex | bool | None):
        digest.update(f"{type(value).__name__} {value!r};".encode(errors="backslashreplace"))
    else:
        digest.update(f"{type(value).__module__}.{type(value).__qualname__};".encode())


T = TypeVar("T")

Batch = dict[str, Tensor]
# Makes of how a batch is loaded (None: there is none any more) what is handed on; None of None.
Make = Callable[[Callable[[], Batch | None]], T | None]

_END = object()


@dataclass(frozen=True)
class MadeBatch(Generic[T]):
    """What was made of a batch, and of the first of each worker a digest of its first sample."""

    made: T
    digest: str | None


class StreamPass(IterableDataset[MadeBatch[T]]):
    """One pass over a task's stream, batch by batch. Samples that fill no batch at its end are left out, or
    (`keeps_rest`) are a smaller one.

    Its state says how many samples it has asked for, and has that of the dataset or of its iterator where
    they have `state_dict` and `load_state_dict`. To go on without one, as many samples are read and left.
    """

    def __init__(
        self, task: Task | FlowTask, seed: int, epoch: int, make: Make[T], *, keeps_rest: bool = False
    ) -> None:
        self._task = task
        self._epoch = epoch
        self._keeps_rest = keeps_rest
        self._make = make
        self._reads = SeededCalls(seed, task.name, "stream", epoch)
        self._collates = SeededCalls(seed, task.name, "stream batch", epoch)
        self._epochs = Epochs(task, seed)
        self._place: dict[str, Any] = {"samples": 0, "dataset": None, "iterator": None}
        self._begins_at = self._place

    def state_dict(self) -> dict[str, Any]:
        """Return where this worker is, as JSON."""
        return self._place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin there the next time."""
        self._begins_at = self._place = dict(state)

    def __iter__(self) -> Iterator[MadeBatch[T]]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        begins_at, self._begins_at = self._begins_at, {"samples": 0, "dataset": None, "iterator": None}
        samples: Iterator[Any] | None = None
        samples_taken = 0
        digest: str | None = None

        def load() -> Batch | None:
            nonlocal samples, samples_taken, digest
            with generators_kept(), ExitStack() as within:
                if samples is None:
                    samples, samples_taken = self._begun(worker, begins_at)
                within.enter_context(self._epochs.at(self._epoch))
                first = samples_taken
                items: list[Any] = []
                while len(items) < self._task.batch_size:
                    item = self._next(samples, worker, samples_taken)
                    if item is _END and items and self._keeps_rest:
                        break
                    if item is _END:
                        return None
                    samples_taken += 1
                    items.append(filled(self._task.name, self._task.absent, item))
                digest = digest_of(items[0]) if first == 0 else None
                batch = self._collates.call(partial(collate, self._task, items), worker, first)
            self._place = self._now(samples, samples_taken)
            return batch

        while (made := self._make(load)) is not None:
            yield MadeBatch(made, digest)

    def _begun(self, worker: int, place: Mapping[str, Any]) -> tuple[Iterator[Any], int]:
        """Return the dataset's iterator at that place, and how many samples it was asked for before."""
        dataset = self._task.dataset
        self._epochs.begin(self._epoch)
        if place["dataset"] is not None:
            dataset.load_state_dict(from_json(place["dataset"]))
        samples: Any = iter(dataset)
        if place["iterator"] is not None:
            samples.load_state_dict(from_json(place["iterator"]))
        elif place["dataset"] is None and place["samples"]:
            self._read_again(samples, worker, place["samples"])
        return samples, place["samples"]

    def _read_again(self, samples: Any, worker: int, count: int) -> None:
        began = time.monotonic()
        for number in range(count):
            self._next(samples, worker, number)
        seconds = format_seconds(time.monotonic() - began)
        print(f"task {self._task.name!r}: {count} samples of its stream were read again, to go on: {seconds}")

    def _next(self, samples: Iterator[Any], worker: int, number: int) -> Any:
        try:
            # The first draws the same in all workers, so that those which read the same samples are noticed.
            return self._reads.call(lambda: next(samples, _END), worker if number else 0, number)
        except Exception as error:
            where = "" if worker == 0 else f" of loader worker {worker}"
            error.add_note(f"at sample {number}{where} in epoch {self._epoch} of the stream")
            raise

    def _now(self, samples: Any, samples_taken: int) -> dict[str, Any]:
        dataset, name = self._task.dataset, self._task.name
        inner = iterator = None
        if samples is not dataset and _keeps_state(samples):
            iterator = to_json(samples.state_dict(), name)
        elif _keeps_state(dataset):
            inner = to_json(dataset.state_dict(), name)
        return {"samples": samples_taken, "dataset": inner, "iterator": iterator}


def _keeps_state(value: Any) -> bool:
    """Whether it goes on by a state of its own, exactly."""
    return (
        hasattr(value, "state_dict") and hasattr(value, "load_state_dict") and not _leaves_out_buffer(value)
    )


def _leaves_out_buffer(dataset: Any) -> bool:
    """Whether it is one of Hugging Face that shuffles in a buffer: its state has not what is in the buffer,
    so that these samples would be lost.
    """
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if "BufferShuffled" in type(part).__name__:
            return True
        if part is not None:
            parts += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return False
