"""A contrastive loss of an op's shares with what they gather, in plain differentiable operations.

As joint_norms.py has it: a share runs up to the first gather of rows that are not known yet, and all run once
more when all have come there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from spindle_cli.operators import batch_dependent
from spindle_cli.operators.batch_dependent import pairs_over_shares
from spindle_cli.operators.tensor_group import TensorGroup
from spindle_cli.workload.graph import Op, TaskGraph


class _ReachedError(Exception):
    def __init__(self, own: Tensor, dim: int) -> None:
        super().__init__()
        self.own, self.dim = own, dim


class _Joint:
    def __init__(self) -> None:
        self.known: list[Tensor] = []  # rows of all shares, by call
        self.calls = 0

    def gather_rows(self, own: Tensor, dim: int, _: Any) -> Tensor:
        if self.calls == len(self.known):
            raise _ReachedError(own, dim)
        self.calls += 1
        return self.known[self.calls - 1]


def run_pairs(
    module: nn.Module, task: TaskGraph, op: Op, cuts: Sequence[int], arguments: Sequence[Sequence[Any]]
) -> list[Tensor]:
    """What all shares of a contrastive loss give, share k of the samples from `cuts[k]` to `cuts[k + 1]`."""
    joint = _Joint()
    shares: list[Callable[[], Tensor]] = []
    for member, each in enumerate(arguments):
        group = TensorGroup(tuple(range(len(arguments))), member, torch.device("cpu"))
        shares.append(partial(pairs_over_shares(module, task, op, group, cuts), *each))
    while True:
        results, reached = [], []
        for share in shares:
            joint.calls = 0
            try:
                with patch.object(batch_dependent, "gather_rows", joint.gather_rows):
                    results.append(share())
            except _ReachedError as at:
                reached.append(at)
        if not reached:
            return results
        assert not results, "some shares gather what others do not"
        joint.known.append(torch.cat([each.own for each in reached], reached[0].dim))
