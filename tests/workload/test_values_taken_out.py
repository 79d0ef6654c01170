"""Values that leave torch for numpy or scipy: what takes them runs whole, and trains as plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.training.batches import Batches
from spindle_cli.workload.types import Task, Workload

from .shares import assert_trains_as_plain
from .toy import WIDTH, Block, Items


class ByNumpy(nn.Module):
    """Matches, say: whose costs scipy takes as an array."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.argsort(x.cpu().numpy(), axis=1))


class ByValue(nn.Module):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.argsort(0, descending=float(row.sum()) > 0) for row in x])


@torch.library.custom_op("spindle_tests::order", mutates_args=())
def order(x: Tensor) -> Tensor:
    return torch.from_numpy(np.argsort(x.cpu().numpy(), axis=1))


@order.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.long)


class ByOperation(nn.Module):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = order(x)
        return made


class Sorted(nn.Module):
    def __init__(self, matcher: nn.Module) -> None:
        super().__init__()
        self.block, self.matcher = Block(), matcher

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        weight = torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1)
        return (x.gather(1, self.matcher(x)) * weight).square().mean()


def workload(matcher: type[nn.Module], *operators: type[nn.Module]) -> Workload:
    torch.manual_seed(0)
    return Workload("w", [Task("t", Sorted(matcher()), 4, Items(x=(5, WIDTH)))], (Block, *operators))


@pytest.mark.parametrize(
    ("matcher", "operators", "coupled"),
    [
        (ByNumpy, (ByNumpy,), [False, True]),
        (ByValue, (ByValue,), [False, True]),
        (ByNumpy, (), [False, True]),
        (ByOperation, (), [False, True]),
        (ByOperation, (ByOperation,), [False, True]),
    ],
)
def test_what_takes_them_runs_whole_and_trains_as_plain_torch(
    matcher: type[nn.Module], operators: tuple[type[nn.Module], ...], coupled: list[bool]
) -> None:
    made = workload(matcher)
    graph = analysed(workload(matcher, *operators)).tasks["t"]
    assert [op.coupled for op in graph.ops] == coupled
    (task,) = made.tasks
    assert_trains_as_plain(task, graph, Batches(task, seed=1).rows(0, 0, 4), [0, 1, 4])
