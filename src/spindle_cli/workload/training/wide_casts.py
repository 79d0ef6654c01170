"""Casts to float32 in users' code, where all of a workload is computed in float64.

Losses and norms are often written with `.float()` or `dtype=torch.float32`, for what is trained in fewer
bits. In a comparison in float64 they would round to 1e-7, and shares of a mean otherwise than the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FLOAT: Callable[..., Any] = Tensor.float
_TYPE: Callable[..., Any] = Tensor.type
_TYPE_NAMES = ("torch.FloatTensor", "torch.cuda.FloatTensor")


class WideCasts(TorchFunctionMode):
    """Inside, float64 stands wherever code says float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _FLOAT:
            return args[0].double(**kwargs)
        if func is _TYPE and len(args) > 1 and args[1] in _TYPE_NAMES:
            return args[0].double()
        for arg in args:  # this is asked of every call: a loop takes half as long as any()
            if arg is torch.float32:
                args = tuple(map(_widened, args))
                break
        if kwargs:
            kwargs = {name: _widened(arg) for name, arg in kwargs.items()}
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
