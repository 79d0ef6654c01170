"""Modes that hold in backward passes, too: what runs forward again there (recomputed layers,
`torch.utils.checkpoint`), and the backward passes that users write, are code like any other.

Torch puts a mode away while one of its functions runs, and the walk back through a graph is one: modes are
put on again for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
# What all three of them call in the end: it asks no mode any more.
_ENGINE = "_engine_run_backward"
_RUN_ENGINE: Callable[..., Any] = getattr(torch.autograd, _ENGINE)


class ModeInBackward(TorchFunctionMode):
    """A mode whose `__torch_function__` hands calls on by `call`."""

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of torch; while one walks back through a graph, the mode is on again."""
        if func not in _BACKWARD:
            return func(*args, **kwargs)
        with _put_on_again(self):
            return func(*args, **kwargs)


class _PutAway(threading.local):
    """The modes that this thread has put away for a backward pass about to begin, the inmost first."""

    def __init__(self) -> None:
        self.modes: list[TorchFunctionMode] = []


_put_away = _PutAway()
_lock = threading.Lock()
_in_use = 0


@contextmanager
def _put_on_again(mode: TorchFunctionMode) -> Iterator[None]:
    """Threads may come and go in any order: torch's own function is back when the last has gone."""
    global _in_use
    with _lock:
        _in_use += 1
        setattr(torch.autograd, _ENGINE, _run_engine)
    _put_away.modes.append(mode)
    try:
        yield
    finally:
        _put_away.modes.pop()
        with _lock:
            _in_use -= 1
            if _in_use == 0:
                setattr(torch.autograd, _ENGINE, _RUN_ENGINE)


def _run_engine(*args: Any, **kwargs: Any) -> Any:
    modes, _put_away.modes = _put_away.modes, []  # a backward pass inside of this one has its own
    try:
        with ExitStack() as on:
            for mode in reversed(modes):
                on.enter_context(mode)
            return _RUN_ENGINE(*args, **kwargs)
    finally:
        _put_away.modes = modes
