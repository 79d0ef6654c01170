"""Casts to float32 in users' code, where all of a workload is computed in float64.

Losses and norms are often written with `.float()` or `dtype=torch.float32`, for what is trained in fewer
bits. In a comparison in float64 they would round to 1e-7, and shares of a mean otherwise than the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from spindle_cli.workload.mode_in_backward import ModeInBackward

_FLOAT: Callable[..., Any] = Tensor.float
_COMPLEX: Callable[..., Any] = Tensor.cfloat  # type: ignore[attr-defined]  # torch gives it no type
_TYPE: Callable[..., Any] = Tensor.type
_TYPE_NAMES = ("torch.FloatTensor", "torch.cuda.FloatTensor")


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
    """The keywords of a call that a mode has got, with the weight of `l1_loss`, which torch 2.13 hands on to
    no mode or tracer.
    """
    found = kwargs or {}
    return {**l1_loss_weight(), **found} if func is functional.l1_loss else found


def l1_loss_weight() -> dict[str, Any]:
    """The weight of the call of l1_loss that is under way."""
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
