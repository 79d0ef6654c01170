"""An operator that asks for gradients itself is profiled and checked as it is trained."""

from __future__ import annotations

from time import monotonic

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.profile.checking.task import CheckLimits, TaskChecker
from spindle_cli.profile.op.inputs import ChainInputs
from spindle_cli.profile.op.jobs import OpRef
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.types import Task, Workload

WIDTH, BATCH = 4, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.map(x))


class Slope(nn.Module):
    """The slope of its energy by what the layer before it gives; `couples`: of the batch's mean."""

    def __init__(self, couples: bool) -> None:
        super().__init__()
        self.map, self.couples = nn.Linear(WIDTH, WIDTH), couples

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.tanh(self.map(x)).square()
        total = energy.mean() if self.couples else energy.sum()
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        return x - slope


class Net(nn.Module):
    def __init__(self, couples: bool) -> None:
        super().__init__()
        self.first, self.slope, self.last = Layer(), Slope(couples), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.slope(self.first(x))).square().mean()  # type: ignore[no-any-return]


def workload(couples: bool) -> Workload:
    torch.manual_seed(0)
    data = [{"x": x} for x in torch.randn(BATCH, WIDTH)]
    return Workload("w", [Task("t", Net(couples), BATCH, data)], (Layer, Slope))


@pytest.mark.parametrize("couples", [True, False])
def test_numbers_of_what_is_behind_it_are_checked(couples: bool) -> None:
    task = analysed(workload(couples)).tasks["t"]
    assert task.ops[1].coupled is couples
    names = {op.index: str(op.target) for op in task.ops}
    found = TaskChecker(task, names, 0, CheckLimits(monotonic() + 60, 60, 2**34)).check()
    assert set(found.checked) == ({"first", "last"} if couples else {"first", "slope", "last"})
    assert (found.whole, found.unchecked, found.forward_unchecked) == ({}, {}, None)


@pytest.mark.parametrize("couples", [True, False])
def test_what_is_behind_it_is_timed_on_what_it_gives(couples: bool) -> None:
    graph = analysed(workload(couples))
    refs = [OpRef("t", op.index) for op in graph.tasks["t"].ops]
    inputs = ChainInputs(
        graph, {ref: ref for ref in refs}, {refs[-1]}, TrainSettings(seed=3), torch.device("cpu")
    )
    (given,) = inputs.take(refs[-1], BATCH)
    net = graph.workload.tasks[0].module
    batch = {tuple(item["x"].tolist()) for item in graph.workload.tasks[0].dataset}
    assert len(batch) == BATCH and given.requires_grad and given.is_leaf
    # The batch has some order, so compare what does not depend on it.
    x = torch.stack([item["x"] for item in graph.workload.tasks[0].dataset])
    expected = net.slope(net.first(x)).detach()
    torch.testing.assert_close(given.detach().sum(0), expected.sum(0))
