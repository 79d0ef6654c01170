"""Differentiable functions that torch lacks, and how they are called: the sums of a tensor-parallel group,
which are f and g of Megatron (Shoeybi et al., arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spindle_cli.operators.tensor_group import TensorGroup


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Apply a differentiable function of one result, with the type that torch leaves out."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return result


def sum_backward(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The tensor, which all devices have alike and each uses for its own part: its gradient is summed."""
    return applied(_SumBackward, tensor, group)


def sum_forward(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The sum of the devices' tensors; takes the memory of a tensor that nobody else needs."""
    return applied(_SumForward, tensor, group)


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.group.sum_(summed, is_gradient=True)
        return summed, None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        # In place: neither a linear map's backward pass needs its output, nor a masked lookup's.
        summed = tensor.detach().contiguous()
        group.sum_(summed, is_gradient=False)
        return summed  # no view: it may be changed in place

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
