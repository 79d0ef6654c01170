"""Calling our own differentiable functions, with the type that torch leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """What a function of one result gives, differentiable."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return result
