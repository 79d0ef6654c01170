"""Functions and methods that take sizes and give tensors: torch.fx does not see them unless told to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

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


@contextlib.contextmanager
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

    with contextlib.ExitStack() as undo:
        for owner, name in places:
            original = getattr(owner, name)
            if name in vars(owner):
                undo.callback(setattr, owner, name, original)
            else:
                undo.callback(delattr, owner, name)
            setattr(owner, name, recorded(original, owner is Tensor))
        yield
