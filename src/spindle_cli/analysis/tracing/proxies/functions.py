"""Let functions of Python's and torch's take traced values: those that ask what a value is, those that take
sizes, which torch.fx does not see unless told to, and hooks by which transformers hands hidden states
on.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import UnionType
from typing import Any, Union, get_args, get_origin

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution

_MODULE = "transformers.utils.output_capturing"
# What it sets on a model once its hooks are there.
MARKS = frozenset({"_output_capturing_hooks_installed"})


def is_recorded(module: nn.Module) -> bool:
    """Whether hooks of transformers look at what a module gives."""
    return bool(_hooks(module))


def record(module: nn.Module, args: Sequence[Any], output: fx.Proxy | tuple[fx.Proxy, ...]) -> None:
    """Show a traced output to the hooks, which keep it if forward has asked for it.

    When an op runs the layer, nobody asks, and they keep nothing.
    """
    for hook in _hooks(module):
        hook(module, tuple(args), output)


def _hooks(module: nn.Module) -> list[Callable[..., Any]]:
    return [hook for hook in module._forward_hooks.values() if getattr(hook, "__module__", "") == _MODULE]


_ONE_DRAW = torch.Size()
_OF_PYTHON = builtins.isinstance
# What torch has for hints to compilers, and transformers for checks of its inputs: no part of the model.
_CHECKS = ("_check", "_check_with", "_check_tensor_all", "_check_tensor_all_with", "_check_value")
# Functions that take sizes, not tensors: torch.fx does not see them unless told to.
_CREATORS = (
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randn",
    "zeros",
    "broadcast_shapes",
)
# The same of methods: of a tensor that is no traced value, as one that a module keeps and no buffer is.
_BY_SIZES = ("expand", "narrow", "repeat", "reshape", "tile", "unflatten", "view")
# What is asked for the limits of a dtype.
_LIMITS = ("finfo", "iinfo")


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
def isinstance_of_python() -> Iterator[None]:
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


@contextmanager
def creators_traced(tracer: fx.Tracer) -> Iterator[None]:
    """Let torch.arange and the like be recorded when a size among their arguments is a proxy, methods of
    tensors that are none too, and checks of traced values be none.
    """
    functions = (*_CREATORS, *_LIMITS, *_CHECKS)
    places: list[tuple[Any, str]] = [(torch, name) for name in functions]
    places += [(Tensor, name) for name in _BY_SIZES]

    def recorded(original: Callable[..., Any], is_method: bool) -> Callable[..., Any]:
        def create(*args: Any, **kwargs: Any) -> Any:
            proxies: list[fx.Proxy] = []
            fx.node.map_aggregate(
                (args, kwargs), lambda item: proxies.append(item) if isinstance(item, fx.Proxy) else None
            )
            if not proxies:
                return original(*args, **kwargs)
            if original.__name__ in _CHECKS:
                return None
            if is_method:
                return tracer.create_proxy("call_method", original.__name__, args, kwargs)
            return tracer.create_proxy("call_function", original, args, kwargs)

        return create

    with ExitStack() as undo:
        for owner, name in places:
            original = getattr(owner, name)
            if name in vars(owner):
                undo.callback(setattr, owner, name, original)
            else:
                undo.callback(delattr, owner, name)
            setattr(owner, name, recorded(original, owner is Tensor))
        yield


def _is_torch(scope: dict[str, Any]) -> bool:
    """Whether code is torch's or our own, by its globals."""
    name = str(scope.get("__name__"))
    return name.partition(".")[0] in ("torch", "spindle_cli") and not name.startswith("torch.distributions.")


def _asks_for_traced(classes: Any) -> bool:
    if type(classes) is tuple or get_origin(classes) in (Union, UnionType):
        return any(map(_asks_for_traced, classes if type(classes) is tuple else get_args(classes)))
    return type(classes) is type and issubclass(classes, fx.Proxy)
