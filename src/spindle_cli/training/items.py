"""What an item of a dataset depends on beside its index: the epoch, and random numbers.

A crop, a masked token or noise is drawn inside `dataset[i]` or `collate`, from generators that belong to the
process. So each call starts from a seed of its own, which follows from the training seed, the task, the epoch
and the sample (of a collate: the batch); it is the same on every rank that reads a sample, and in plain
PyTorch. Afterwards the generators go on as they were: what the model itself draws does not depend on the
data.

What has `set_epoch` is told the epoch before its items are read. Several readers may take items of one
dataset object: two tasks whose epochs have other lengths, training and evaluation, a thread that reads ahead
beside the main one. So each reader says which epoch it reads, an object is told of it where it was last told
of another, and while items are read nobody tells it anything else.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from spindle_cli.workload.introspection import fields_of
from spindle_cli.workload.types import FlowTask, Task

# Names of functions and methods of torch, without the underscore of those that work in place.
DRAWING_FUNCTIONS = frozenset(
    {
        "_sample_dirichlet",
        "_standard_gamma",
        "alpha_dropout",
        "bernoulli",
        "binomial",
        "cauchy",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "exponential",
        "feature_alpha_dropout",
        "feature_dropout",
        "geometric",
        "log_normal",
        "multinomial",
        "normal",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random",
        "randperm",
        "rrelu",
        "uniform",
    }
)


T = TypeVar("T")

_TORCH_SEEDS = 2**63
_NUMPY_SEEDS = 2**32
_MT19937_BYTES = 625 * 4  # 624 words, and how many of them were used


def seed_of(*parts: object) -> int:
    """Return a seed that follows from all parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


@dataclass(frozen=True)
class Generators:
    """States of the generators that a dataset may draw from: torch's of the CPU, numpy's, Python's."""

    torch: Tensor
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> Generators:
        """Return the states of all generators."""
        return cls(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())

    def restore(self) -> None:
        """Let the generators have these states."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Draw and seed inside; afterwards the process's generators go on as if nothing had been drawn."""
    before = Generators.now()
    try:
        yield
    finally:
        before.restore()


@dataclass(frozen=True)
class _Places:
    """Where the same generators are, from which nothing has been drawn since they were seeded."""

    torch: Tensor
    numpy: bytes
    python: Any

    @classmethod
    def now(cls) -> _Places:
        """Return where the generators are. This is called for every sample, of which the states as numpy
        hands them out would take most of the time.
        """
        return cls(torch.get_rng_state(), _memory_of_numpy(), random.getstate())

    def is_same(self, second: _Places) -> bool:
        """Whether nothing was drawn or seeded between the two."""
        return (
            self.numpy == second.numpy
            and self.python == second.python
            and torch.equal(self.torch, second.torch)
        )


def _memory_of_numpy() -> bytes:
    """Return what numpy's generator holds, but for a second normal number that it keeps for later: to have
    kept one, it has drawn.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not said to be exported
    if type(generator) is not np.random.MT19937:  # another was put in its place
        return pickle.dumps(np.random.get_state(legacy=False))
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


class SeededCalls:
    """Calls that may draw, each from a seed of its own.

    `draws`: whether one of them has drawn so far.
    """

    def __init__(self, *what: object) -> None:
        """`what`: all these calls' seeds follow from it."""
        self._what = what
        self.draws = False

    def call(self, read: Callable[[], T], *what: object) -> T:
        """Return what `read` gives from the seed of `what`; inside of `generators_kept`."""
        seed = seed_of(*self._what, *what)
        torch.default_generator.manual_seed(seed % _TORCH_SEEDS)
        np.random.seed(seed % _NUMPY_SEEDS)
        random.seed(seed)
        if self.draws:
            return read()
        before = _Places.now()
        result = read()
        self.draws = not before.is_same(_Places.now())
        return result


class DrawsError(BaseException):
    """Something has drawn where it must not. Not an Exception: code of the user's is not to handle it."""


@contextmanager
def no_draws() -> Iterator[None]:
    """Stop what draws inside, before torch draws: for threads, as generators cannot be seeded beside others
    that draw from them.

    Raises:
        DrawsError: something draws, or (as nobody can tell) another thread has drawn from numpy's or Python's
            generator meanwhile.
    """
    before = np.random.get_state(legacy=False), random.getstate()
    with _NoTorchDraws():
        yield
    after = np.random.get_state(legacy=False), random.getstate()
    if before[1] != after[1] or pickle.dumps(before[0]) != pickle.dumps(after[0]):
        raise DrawsError


class _NoTorchDraws(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "").rstrip("_")
        if name in DRAWING_FUNCTIONS and given.get("generator") is None:
            raise DrawsError
        return func(*args, **given)


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
