"""Batch norms of an op's shares by statistics of all of them, in plain differentiable operations.

A share runs up to the first batch norm whose statistics are not known yet. When all have come there they are
known, as functions of what all have brought; and all run once more, now past it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.analysis.rules.batch_norms import shared_norms, with_forward


class _ReachedError(Exception):
    def __init__(self, norm: Any, tensor: Tensor) -> None:
        super().__init__()
        self.norm, self.tensor = norm, tensor


class _Joint:
    def __init__(self) -> None:
        self.known: list[tuple[Tensor, Tensor]] = []  # mean and variance, by call
        self.calls = 0

    def normalise(self, norm: Any, tensor: Tensor) -> Tensor:
        if self.calls == len(self.known):
            raise _ReachedError(norm, tensor)
        mean, variance = self.known[self.calls]
        self.calls += 1
        shape = (1, -1, *(1,) * (tensor.dim() - 2))
        result = (tensor - mean.view(shape)) / (variance.view(shape) + norm.eps).sqrt()
        return result if norm.weight is None else result * norm.weight.view(shape) + norm.bias.view(shape)

    def learn(self, reached: Sequence[_ReachedError]) -> None:
        norm = reached[0].norm
        joined = torch.cat([each.tensor.transpose(0, 1).flatten(1) for each in reached], 1)
        self.known.append((joined.mean(1), joined.var(1, correction=0)))
        norm.num_batches_tracked.add_(1)
        functional.batch_norm(
            joined.detach().T, norm.running_mean, norm.running_var, training=True, momentum=norm.momentum
        )


def run_shares(module: nn.Module, shares: Sequence[Callable[[], Any]]) -> list[Any]:
    """What all shares of an op give."""
    joint = _Joint()
    while True:
        results, reached = [], []
        for share in shares:
            joint.calls = 0
            try:
                with with_forward(shared_norms(module).values(), joint.normalise):
                    results.append(share())
            except _ReachedError as at:
                reached.append(at)
        if not reached:
            return results
        assert not results, "some shares take a batch norm that others do not"
        joint.learn(reached)
