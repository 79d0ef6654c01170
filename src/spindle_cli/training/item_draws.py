"""Random numbers that a dataset draws: the same on every rank that reads a sample, and in plain PyTorch.

A crop, a masked token or noise is drawn inside `dataset[i]` or `collate`, from generators that belong to the
process. So each call starts from a seed of its own, which follows from the training seed, the task, the epoch
and the sample (of a collate: the batch). Afterwards the generators go on as they were: what the model itself
draws does not depend on the data.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spindle_cli.workload.own_draws import DRAWING_FUNCTIONS

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
