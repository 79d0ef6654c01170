"""What the devices of a tensor-parallel group exchange where they hold a part of the sequence each.

As in Megatron-LM (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): the sum behind a rowwise map
becomes a reduce-scatter along the sequence, and before a colwise map the parts are gathered; backward it is
the other way round. Together they move the bytes of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spindle_cli.operators.autograd import applied
from spindle_cli.operators.sequence.types import part_sizes
from spindle_cli.operators.tensor_group import TensorGroup


@dataclass(frozen=True, eq=False)
class SequencePart:
    """The positions that one of `degree` devices has of a sequence, which lies along dimension `dim`."""

    degree: int
    dim: int
    group: TensorGroup

    def cut(self, whole: Tensor) -> Shared:
        """This device's part of what all have alike; its gradient is gathered."""
        return Shared(applied(_Cut, whole, self), whole.shape[self.dim], self)

    def gather(self, shared: Shared) -> Tensor:
        """All positions, of which each device uses all for its own part of a layer: the gradients that they
        find are summed, and each takes its own positions of that.
        """
        return applied(_Gathered, shared.tensor, shared.length, self)

    def scatter_sum(self, summand: Tensor) -> Shared:
        """This device's part of the sum of what the devices have for all positions."""
        return Shared(applied(_Scattered, summand, self), summand.shape[self.dim], self)

    def part_of(self, whole: Tensor, *, is_gradient: bool = False) -> Tensor:  # noqa: ARG002 - for other parts
        """Gives this device's positions of a whole tensor, in memory of their own."""
        sizes = part_sizes(whole.shape[self.dim], self.degree)
        first = sum(sizes[: self.group.member])
        part = whole.narrow(self.dim, first, sizes[self.group.member])
        return part.clone(memory_format=torch.contiguous_format)

    def join(self, tensor: Tensor, size: int, *, is_gradient: bool) -> Tensor:
        """All `size` positions of what each device has its own of."""
        sizes = part_sizes(size, self.degree)
        return self.group.gather_along(tensor.contiguous(), self.dim, sizes, is_gradient=is_gradient)

    def reduce_scatter(self, whole: Tensor, *, is_gradient: bool) -> Tensor:
        """Sum a tensor over the devices and return this device's positions of the sum."""
        sizes = part_sizes(whole.shape[self.dim], self.degree)
        return self.group.scatter_sum_along(whole.contiguous(), self.dim, sizes, is_gradient=is_gradient)


@dataclass(frozen=True, eq=False)
class Shared:
    """A tensor of which this device has its own positions of a sequence; `length`: of how many in all.

    What glue may ask a tensor for beside its values, it answers as the whole tensor would (`QUESTIONS`).
    """

    tensor: Tensor
    length: int
    part: SequencePart

    def whole(self) -> Tensor:
        """Gather all positions, the same on every device."""
        return applied(_Joined, self.tensor, self.length, self.part)

    @property
    def device(self) -> torch.device:
        """The device on which the tensor is."""
        return self.tensor.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of its entries."""
        return self.tensor.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor, with the positions of all devices."""
        sizes = list(self.tensor.shape)
        sizes[self.part.dim] = self.length
        return torch.Size(sizes)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As a tensor's."""
        return self.tensor.dim()


# Names of these, of attributes and of methods.
QUESTIONS = (frozenset({"device", "dtype", "shape"}), frozenset({"size", "dim"}))


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: SequencePart) -> Tensor:
        ctx.part, ctx.size = part, whole.shape[part.dim]
        return part.part_of(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.part.join(gradients[0], ctx.size, is_gradient=True), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int, part: SequencePart) -> Tensor:
        ctx.part = part
        return part.join(tensor, size, is_gradient=False).detach()  # no view: it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.part.part_of(gradients[0], is_gradient=True), None, None


class _Gathered(_Joined):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.part.reduce_scatter(gradients[0], is_gradient=True), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, part: SequencePart) -> Tensor:
        ctx.part, ctx.size = part, summand.shape[part.dim]
        return part.reduce_scatter(summand, is_gradient=False).detach()  # no view: it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.part.join(gradients[0], ctx.size, is_gradient=True), None
