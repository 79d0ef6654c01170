"""Data that change from epoch to epoch: what has `set_epoch` is told the epoch before its items are read.

Several readers may take items of one dataset object: two tasks whose epochs have other lengths, training and
evaluation, a thread that reads ahead beside the main one. So each reader says which epoch it reads, an object
is told of it where it was last told of another, and while items are read nobody tells it anything else.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from spindle_cli.training.item_draws import SeededCalls, no_draws
from spindle_cli.workload.fields import fields_of
from spindle_cli.workload.types import FlowTask, Task

_lock = threading.RLock()
# By the id of an object, which it is, and what it was told last: the seed (None: it does not matter, nothing
# was drawn) and the epoch.
_last_told: dict[int, tuple[weakref.ref[Any], tuple[int | None, int]]] = {}


def _renew_lock() -> None:
    """A fork has none of the threads that may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Epochs:
    """The epochs of a task's data, for one of their readers.

    Attributes:
        told: the objects that are told which epoch it is; none of data without `set_epoch`.
    """

    def __init__(self, task: Task | FlowTask, seed: int) -> None:
        """`seed`: what set_epoch draws follows from it and the epoch."""
        self.told = told_of(task)
        self._seed = seed
        self._calls = SeededCalls(seed, "epoch")

    @property
    def draws(self) -> bool:
        """Whether set_epoch has drawn random numbers so far."""
        return self._calls.draws

    @contextmanager
    def at(self, epoch: int, *, may_draw: bool = True) -> Iterator[None]:
        """Inside the data are what they are in this epoch; in `generators_kept`, or else without draws.

        Raises:
            DrawsError: set_epoch draws, and `may_draw` is False.
            Exception: whatever set_epoch raised.
        """
        if not self.told:
            yield
            return
        with _lock:
            for data in self.told:
                if not self._knows(data, epoch):
                    self._tell(data, epoch, may_draw=may_draw)
            yield

    def begin(self, epoch: int) -> None:
        """Tell it whatever was told last: a pass begins; raises what set_epoch raises."""
        with _lock:
            for data in self.told:
                self._tell(data, epoch, may_draw=True)

    def _knows(self, data: Any, epoch: int) -> bool:
        reference, last = _last_told.get(id(data), (None, None))
        is_known = reference is not None and reference() is data
        return is_known and last in ((self._seed, epoch), (None, epoch))

    def _tell(self, data: Any, epoch: int, *, may_draw: bool) -> None:
        _last_told.pop(id(data), None)  # half told is not told
        _own_epoch(data)
        call = partial(data.set_epoch, epoch)
        try:
            if may_draw:
                self._calls.call(call, epoch)
            else:
                with no_draws():
                    call()
        except Exception as error:
            error.add_note(f"in set_epoch({epoch}) of {type(data).__name__}")
            raise
        with suppress(TypeError):  # where there are no references, it is told anew each time
            reference = weakref.ref(data, partial(_forget, id(data)))
            _last_told[id(data)] = reference, (self._seed if self.draws else None, epoch)


def _own_epoch(dataset: Any) -> None:
    """Let this process have an epoch of its own. Hugging Face's datasets keep theirs in memory that all
    workers share, and set it by adding what is missing: two that do so at once end with another number.
    """
    epoch = getattr(dataset, "_epoch", None)
    if isinstance(epoch, Tensor) and epoch.is_shared():  # type: ignore[no-untyped-call]  # torch: untyped
        dataset._epoch = epoch.clone()


def told_of(task: Task | FlowTask) -> tuple[Any, ...]:
    """Return what of a task's data is told which epoch it is: the dataset if it has `set_epoch`, else what it
    holds that has one, and what datasets that it holds have in their turn (torch's Subset and ConcatDataset
    have none); and a collate that has one.
    """
    told: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    waiting = [task.dataset]
    collates: Any = getattr(task.collate, "__self__", task.collate)
    if callable(getattr(collates, "set_epoch", None)):
        waiting.append(collates)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if callable(getattr(value, "set_epoch", None)):
            told[id(value)] = value
        else:
            waiting += _held_by(value)
    return tuple(told.values())


def _held_by(value: Any) -> Iterator[Any]:
    """What an object has in attributes, or in lists and dicts there, and may be told or hold what is."""
    for held in (fields_of(value) or {}).values():
        if isinstance(held, dict):
            inner: Collection[Any] = held.values()
        else:
            inner = held if isinstance(held, list | tuple) else (held,)
        # A list may have a million entries, of one class.
        wanted = {kind for kind in set(map(type, inner)) if _may_be_told(kind)}
        if wanted:
            yield from (entry for entry in inner if type(entry) in wanted)


def _may_be_told(kind: type) -> bool:
    """Asked of classes: some objects have an attribute of any name."""
    return issubclass(kind, Dataset) or callable(getattr(kind, "set_epoch", None))


def _forget(key: int, reference: weakref.ref[Any]) -> None:
    if _last_told.get(key, (None,))[0] is reference:
        del _last_told[key]
