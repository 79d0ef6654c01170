"""Constants that forward makes of numbers while it is traced, as it would make them in float64.

A trace holds `torch.tensor([0.1, 0.3])` as it was made: rounded to float32. Plain PyTorch makes it anew in
every step, in a comparison in float64 without that rounding. So each such tensor has a twin, made by the same
calls in float64, which stands in its place wherever a task is computed in that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from spindle_cli.workload.graph import CONSTANT
from spindle_cli.workload.wide.casts import WideCasts, handed_on

_TWIN = "_made_in_float64"
_NOT_MADE = object()
_IN_PLACE = frozenset(
    {"__setitem__", "__set__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv"))}
    | {f"__i{name}__" for name in ("mod", "pow", "and", "or", "xor", "lshift", "rshift", "div")}
)


class MadeInFloat64(TorchFunctionMode):
    """Inside, what is computed of numbers is computed in float64 as well, beside what the caller gets.

    Both ways have tensors of their own, so that what one of them changes in place the other does not see.
    """

    def __init__(self, is_looking: Callable[[], bool]) -> None:
        """`is_looking`: whether calls only find out what is known, and nothing of them stays."""
        super().__init__()
        self._is_looking = is_looking

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = handed_on(func, kwargs)
        given = _leaves((args, kwargs))
        result = func(*args, **kwargs)
        if self._is_looking() or any(isinstance(each, fx.Proxy) for each in given):
            return result
        written = kwargs.get("out", args[0] if args else None) if _writes(func, kwargs) else None
        made = [each for each in _leaves(result) if isinstance(each, Tensor)]
        if written is not None and (not isinstance(written, Tensor) or twin_of(written) is None):
            return result
        if written is None and not made:
            return result
        wide = _in_float64(func, args, kwargs)
        if wide is _NOT_MADE:
            if written is not None:
                delattr(written, _TWIN)
            return result
        before = {id(each) for each in given}
        others = [each for each in _leaves(wide) if isinstance(each, Tensor)]
        for one, other in zip(made, others, strict=True):
            # What lives on might be another by the time that it is asked for; a view of a parameter is none.
            if id(one) not in before and not _lie_in_one_memory(one, other):
                setattr(one, _TWIN, other)
        return result


def twin_of(tensor: Tensor) -> Tensor | None:
    """The tensor as it is made in float64, where that is known."""
    found: Tensor | None = getattr(tensor, _TWIN, None)
    return found


def constants_of_modules(root: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """The tensors that modules hold and are neither parameters nor buffers, each with the attributes that it
    is among and its name there: those that a trace has left on its root, and the modules' own.
    """
    for module in root.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield vars(module), name, value


def forget_equal_twins(root: nn.Module) -> None:
    """Keep the twins of what float32 has rounded alone."""
    for _, name, constant in constants_of_modules(root):
        twin = twin_of(constant) if name.startswith(CONSTANT) else None
        if twin is not None and not constant.is_meta and torch.equal(constant.to(twin.dtype), twin):
            delattr(constant, _TWIN)


def _in_float64(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a call gives of the twins; `_NOT_MADE` where torch has it not in float64: then plain PyTorch would
    fail there, too, and says so.
    """
    wide_args, wide_kwargs = fx.node.map_aggregate((args, kwargs), _wide)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with WideCasts():
            return func(*wide_args, **wide_kwargs)
    except (RuntimeError, TypeError, ValueError):
        return _NOT_MADE
    finally:
        torch.set_default_dtype(before)


def _lie_in_one_memory(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    twin = twin_of(value)
    return value if twin is None else twin


def _leaves(value: Any) -> list[Any]:
    return list(_each(value))


def _each(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for each in value:
            yield from _each(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _each(each)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name: str = getattr(func, "__name__", "")
    return "out" in kwargs or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
