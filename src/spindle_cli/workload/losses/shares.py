"""A loss op as each share of its batch computes it, and what the shares have to know of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from spindle_cli.workload.graph import LossShares

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


def share_of_samples(num_samples: int, batch_size: int, batches: int) -> float:
    """What a share of `num_samples` samples has of a step's batches together."""
    return num_samples / (batch_size * batches)


class LossCounter:
    """Counts for one task's loss, on copies of the tensors that the workload's modules hold."""

    def __init__(self, root: nn.Module, shares: LossShares) -> None:
        assert shares.counts is not None, "there is nothing to count"
        self.fields = shares.count_fields
        self._module = fx.GraphModule(root, shares.counts)
        self._held = {
            name: _exact(tensor.detach().to("cpu", copy=True))
            for name, tensor in self._module.named_buffers()
        }

    def count(self, fields: Mapping[str, Tensor], share: float) -> Tensor:
        """What a share counts: float64 of shape (num_counts,), on the CPU.

        Args:
            fields: the share's rows of (at least) `self.fields`, on the CPU.
            share: of the samples.
        """
        given = [_exact(fields[name]) for name in self.fields]
        with torch.no_grad():
            found = torch.func.functional_call(self._module, self._held, (*given, share))
        return torch.stack([torch.as_tensor(count, dtype=torch.float64) for count in found])


def _exact(tensor: Tensor) -> Tensor:
    """A tensor in which sums are exact, as far as can be."""
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor
