"""Values that no sample has a part in, of which every share has a copy, against the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.profile.numeric_check import TaskCheck
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.types import Task, Workload

WIDTH = 4


class Biased(nn.Module):
    """Hands on rows, and a bias that no sample has a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        bias = bias + self.shift
        return self.linear(x) + bias, bias


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(Biased() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.start
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x.square().mean()


def graph() -> WorkloadGraph:
    torch.manual_seed(0)
    data = [{"x": torch.randn(WIDTH)} for _ in range(12)]
    found = analysed(Workload("w", [Task("t", Net(), 12, data)], operators=(Biased,)))
    assert not any(op.coupled for op in found.tasks["t"].ops)
    return found


def check(of: WorkloadGraph) -> TaskCheck:
    (task,) = check_numbers(of, 0, CheckSettings(threads=1)).tasks
    return task


def test_a_copy_s_gradient_is_counted_once() -> None:
    found = check(graph())
    assert found.whole == {} and found.largest_difference < 1e-12


def test_a_copy_that_differs_in_any_share_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Biased.forward

    def of_the_first_sample(self: Biased, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        rows, bias = forward(self, x, bias)
        return rows, bias + x.detach()[0]  # the first share has the whole batch's, the others have not

    traced = graph()
    monkeypatch.setattr(Biased, "forward", of_the_first_sample)
    assert check(traced).whole


class Centring(nn.Module):
    """Keeps a running mean in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(y.mean(0), alpha=0.5)
        return y * self.mean


def test_a_tensor_that_an_operator_writes_into_begins_as_it_was() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centring = Centring()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.centring(x).square().mean()
            return out

    data = [{"x": torch.randn(WIDTH)} for _ in range(12)]
    made = analysed(Workload("w", [Task("t", Loss(), 12, data)], operators=(Centring,)))
    assert check(made).largest_difference < 1e-12
    assert torch.equal(made.tasks["t"].root.centring.mean, torch.ones(WIDTH))
