"""Casts to float32 in users' code, where all of a workload is computed in float64.

Losses and norms are often written with `.float()` or `dtype=torch.float32`, for what is trained in fewer
bits. In a comparison in float64 they would round to 1e-7, and shares of a mean otherwise than the whole.

What runs forward again in a backward pass (recomputed layers, `torch.utils.checkpoint`), and backward passes
that users write, are such code, too. Torch puts the mode away while one of its functions runs, and the walk
back through a graph is one: it is put on again for that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FLOAT: Callable[..., Any] = Tensor.float
_COMPLEX: Callable[..., Any] = Tensor.cfloat  # type: ignore[attr-defined]  # torch gives it no type
_TYPE: Callable[..., Any] = Tensor.type
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
# What all three of them call in the end: it asks no mode any more.
_ENGINE = "_engine_run_backward"
_RUN_ENGINE: Callable[..., Any] = getattr(torch.autograd, _ENGINE)
_TYPE_NAMES = ("torch.FloatTensor", "torch.cuda.FloatTensor")


class WideCasts(TorchFunctionMode):
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
        if func in _BACKWARD:
            before = getattr(torch.autograd, _ENGINE)
            setattr(torch.autograd, _ENGINE, self._run_engine)
            try:
                return func(*args, **kwargs)
            finally:
                setattr(torch.autograd, _ENGINE, before)
        return func(*args, **kwargs)

    def _run_engine(self, *args: Any, **kwargs: Any) -> Any:
        """Walk a graph backward with the mode on."""
        with self:
            return _RUN_ENGINE(*args, **kwargs)


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
