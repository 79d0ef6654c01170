"""Users' code in float64, where all of a workload is computed in that: its constants, and its casts.

A trace holds `torch.tensor([0.1, 0.3])` as it was made: rounded to float32. Plain PyTorch makes it anew in
every step, in a comparison in float64 without that rounding. So each such tensor has a twin, made by the same
calls in float64, which stands in its place wherever a task is computed in that.

Losses and norms are often written with `.float()` or `dtype=torch.float32`, for what is trained in fewer
bits. In a comparison in float64 they would round to 1e-7, and shares of a mean otherwise than the whole. So
such casts are to float64 then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from spindle_cli.training.mode_in_backward import ModeInBackward
from spindle_cli.workload.graph import CONSTANT

_TWIN = "_made_in_float64"
_NOT_MADE = object()
_IN_PLACE = frozenset(
    {"__setitem__", "__set__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv"))}
    | {f"__i{name}__" for name in ("mod", "pow", "and", "or", "xor", "lshift", "rshift", "div")}
)
_FLOAT: Callable[..., Any] = Tensor.float
_COMPLEX: Callable[..., Any] = Tensor.cfloat  # type: ignore[attr-defined]  # torch gives it no type
_TYPE: Callable[..., Any] = Tensor.type
_TYPE_NAMES = ("torch.FloatTensor", "torch.cuda.FloatTensor")


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
        if self._is_looking():
            return func(*args, **kwargs)
        given = _leaves((args, kwargs))
        result = func(*args, **kwargs)
        if any(isinstance(leaf, fx.Proxy) for leaf in given):
            return result
        written = kwargs.get("out", args[0] if args else None) if _writes(func, kwargs) else None
        if written is None:
            has_twin = bool(_tensors(result))
        else:
            has_twin = isinstance(written, Tensor) and twin_of(written) is not None
        if has_twin:
            wide = _in_float64(func, args, kwargs)
            if wide is not _NOT_MADE:
                _give_twins(result, wide, given)
            elif written is not None:
                delattr(written, _TWIN)
        return result


def _give_twins(result: Any, wide: Any, given: Sequence[Any]) -> None:
    """Let the tensors of a result that were not `given` have those of the same call in float64 as twins."""
    before = set(map(id, given))
    for narrow, twin in zip(_tensors(result), _tensors(wide), strict=True):
        # What lives on might be another by the time that it is asked for; a view of a parameter is none.
        if id(narrow) not in before and not _lie_in_one_memory(narrow, twin):
            setattr(narrow, _TWIN, twin)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or a result."""
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def twin_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor as it is made in float64, where that is known."""
    twin: Tensor | None = getattr(tensor, _TWIN, None)
    return twin


def constants_of_modules(root: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the tensors that modules hold and are neither parameters nor buffers, each with the attributes
    that it is among and its name there: those that a trace has left on its root, and the modules' own.
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
    """Return what a call gives of the twins; `_NOT_MADE` where torch has it not in float64: then plain
    PyTorch would fail there, too, and says so.
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


def _lie_in_one_memory(first: Tensor, second: Tensor) -> bool:
    if first.layout is not torch.strided or second.layout is not torch.strided:
        return False
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    twin = twin_of(value)
    return value if twin is None else twin


def _leaves(value: Any) -> list[Any]:
    return list(_entries(value))


def _entries(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for entry in value:
            yield from _entries(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _entries(entry)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name: str = getattr(func, "__name__", "")
    return "out" in kwargs or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


class WideCasts(ModeInBackward):
    """Inside, float64 stands wherever code says float32, and complex128 where it says complex64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = handed_on(func, kwargs)
        if func is _FLOAT:
            return args[0].double(**kwargs)
        if func is _COMPLEX:
            return args[0].cdouble(**kwargs)
        if func is _TYPE and len(args) > 1 and args[1] in _TYPE_NAMES:
            return args[0].double()
        for arg in args:  # this is asked of every call: a loop takes half as long as any()
            if arg is torch.float32 or arg is torch.complex64:
                args = tuple(map(_widened, args))
                break
        if kwargs:
            kwargs = {name: _widened(arg) for name, arg in kwargs.items()}
        return self.call(func, args, kwargs)


def handed_on(func: Callable[..., Any], kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the keywords of a call that a mode has got, with the weight of `l1_loss`, which torch 2.13 hands
    on to no mode or tracer.
    """
    given = kwargs or {}
    return {**l1_loss_weight(), **given} if func is functional.l1_loss else given


def l1_loss_weight() -> dict[str, Any]:
    """Return the weight of the call of l1_loss that is under way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        weight = frame.f_locals.get("weight") if frame.f_code is functional.l1_loss.__code__ else None
        if weight is not None:
            return {"weight": weight}
        frame = frame.f_back
    return {}


def _widened(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return torch.complex128 if value is torch.complex64 else value
