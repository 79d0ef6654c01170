"""What the devices of a group exchange around the experts that they share out.

As in GShard (Lepikhin et al., arXiv 2006.16668, section 3.3): what the experts take of a device's own samples
goes to the devices that have these experts, by an all-to-all, and what they give comes back by another;
backward it is the other way round. How much that is follows from the experts' capacity alone, so that no
device has to wait to be told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spindle_cli.operators.autograd import applied
from spindle_cli.operators.sequence.exchange import SequencePart
from spindle_cli.operators.sequence.types import part_sizes
from spindle_cli.operators.tensor_group import TensorGroup

# Of what experts take and give.
SAMPLES_DIM, EXPERTS_DIM = 0, 1


@dataclass(frozen=True, eq=False)
class SamplePart(SequencePart):
    """The samples that one of `degree` devices has of a batch share, which lie along dimension `dim`.

    Of fewer samples than devices the last one is computed again by those that would have none, and what
    they find is dropped: nothing has to run on no samples.
    """

    def part_of(self, whole: Tensor, *, is_gradient: bool = False) -> Tensor:
        """Gives this device's samples of a whole batch, in memory of their own."""
        missing = self.degree - whole.shape[self.dim]
        if missing > 0:
            more = whole.narrow(self.dim, whole.shape[self.dim] - 1, 1)
            again = torch.zeros_like(more) if is_gradient else more
            whole = torch.cat([whole, *[again] * missing], self.dim)
        return super().part_of(whole)

    def join(self, tensor: Tensor, size: int, *, is_gradient: bool) -> Tensor:
        """All `size` samples of what each device has its own of."""
        whole = super().join(tensor, max(size, self.degree), is_gradient=is_gradient)
        return whole.narrow(self.dim, 0, size)

    def sizes(self, size: int) -> tuple[int, ...]:
        """How many of `size` samples each device computes."""
        return part_sizes(max(size, self.degree), self.degree)


@dataclass(frozen=True)
class Dispatch:
    """How many samples, and how many experts, each device of a group has."""

    group: TensorGroup
    samples: tuple[int, ...]
    experts: tuple[int, ...]

    def to_experts(self, tensor: Tensor, *, is_gradient: bool = False) -> Tensor:
        """Exchange [own samples, all experts, ...], which each device has, for [all samples, own experts,
        ...].
        """
        return self.group.exchange(
            tensor, (EXPERTS_DIM, self.experts), (SAMPLES_DIM, self.samples), is_gradient=is_gradient
        )

    def to_samples(self, tensor: Tensor, *, is_gradient: bool = False) -> Tensor:
        """Exchange back what `to_experts` has exchanged."""
        return self.group.exchange(
            tensor, (SAMPLES_DIM, self.samples), (EXPERTS_DIM, self.experts), is_gradient=is_gradient
        )


def dispatched(tensor: Tensor, dispatch: Dispatch) -> Tensor:
    """Run `Dispatch.to_experts` so that it is differentiable."""
    return applied(_Exchanged, tensor, dispatch.to_experts, dispatch.to_samples)


def combined(tensor: Tensor, dispatch: Dispatch) -> Tensor:
    """Run `Dispatch.to_samples` so that it is differentiable."""
    return applied(_Exchanged, tensor, dispatch.to_samples, dispatch.to_experts)


class _Exchanged(torch.autograd.Function):
    """What an exchange gives; its gradient goes the way back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0], is_gradient=True), None, None
