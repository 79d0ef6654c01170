"""Let forward ask what a traced value is."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import UnionType
from typing import Any, Union, get_args, get_origin

import torch
from torch import Tensor, fx
from torch.distributions import Distribution

_ONE_DRAW = torch.Size()
_OF_PYTHON = builtins.isinstance


@contextmanager
def classes_are_known(tracer: Any) -> Iterator[None]:
    """Let `isinstance(x, ...)` and `torch.is_tensor(x)` answer for a traced value as for what it stands for,
    by what `tracer.known` knows.

    Not where torch asks, which has to tell traced values from others; its distributions do not.
    """
    original, of_tensors = _OF_PYTHON, torch.is_tensor

    def is_instance(item: Any, classes: Any, /) -> bool:
        if not original(item, fx.Proxy) or _asks_for_traced(classes) or _is_torch(sys._getframe(1).f_globals):
            return original(item, classes)
        return original(tracer.known.value(item), classes)

    def is_tensor(item: Any, /) -> bool:
        return original(tracer.known.value(item) if original(item, fx.Proxy) else item, Tensor)

    try:
        builtins.isinstance = is_instance
        torch.is_tensor = is_tensor  # type: ignore[assignment]  # put back behind it
        yield
    finally:
        builtins.isinstance, torch.is_tensor = original, of_tensors


@contextmanager
def asked_of_python() -> Iterator[None]:
    """Inside, `isinstance` is Python's own again: what is run is not traced, and asks hundreds of thousands
    of times, torch most of all.
    """
    answering = builtins.isinstance
    builtins.isinstance = _OF_PYTHON
    try:
        yield
    finally:
        builtins.isinstance = answering


@contextmanager
def draws_are_sized() -> Iterator[None]:
    """Let torch.distributions draw as many numbers as the traced parameters of one have: it makes a
    torch.Size of their shape, which takes plain numbers alone.
    """
    original = Distribution._extended_shape

    def extended(self: Distribution, sample_shape: Any = _ONE_DRAW) -> Any:
        shapes = (self._batch_shape, self._event_shape)
        if not any(isinstance(shape, fx.Proxy) for shape in shapes):
            return original(self, sample_shape)
        return torch.Size(sample_shape) + shapes[0] + shapes[1]

    Distribution._extended_shape = extended  # type: ignore[method-assign]  # put back behind it
    try:
        yield
    finally:
        Distribution._extended_shape = original  # type: ignore[method-assign]  # put back


def _is_torch(scope: dict[str, Any]) -> bool:
    """Whether code is torch's or our own, by its globals."""
    name = str(scope.get("__name__"))
    return name.partition(".")[0] in ("torch", "spindle_cli") and not name.startswith("torch.distributions.")


def _asks_for_traced(classes: Any) -> bool:
    if type(classes) is tuple or get_origin(classes) in (Union, UnionType):
        return any(map(_asks_for_traced, classes if type(classes) is tuple else get_args(classes)))
    return type(classes) is type and issubclass(classes, fx.Proxy)
