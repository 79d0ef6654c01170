"""What stands in for the tensors of ops that are timed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.profile.op.jobs import OpRef
from spindle_cli.profile.op.stand_ins import give_parameters
from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.building.abstract import Births, parameters_born
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.types import Task, Workload


class Layer(nn.Module):
    """Divides its weight by a norm, which buffers made of the weight estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(3, 3))
        self.register_buffer("average", self.linear.weight.detach().clone())
        self.register_buffer("bits", self.linear.weight.detach() > 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) + x @ self.average * self.bits.sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def without_parameters() -> WorkloadGraph:
    with parameters_born(Births(), keep=lambda _: False):
        net = Net()
    assert all(buffer.is_meta for buffer in net.buffers())
    task = Task("t", net, 2, [{"x": torch.randn(3)} for _ in range(4)])
    return analyse(Workload("w", [task], operators=(Layer,)))


def test_buffers_that_were_made_of_parameters_are_real_where_their_op_is_timed() -> None:
    graph = without_parameters()
    give_parameters(graph, [OpRef(task="t", op=1)])
    first, second = graph.tasks["t"].root.layers
    assert all(tensor.is_meta for tensor in (*first.buffers(), *first.parameters()))
    assert not any(tensor.is_meta for tensor in (*second.buffers(), *second.parameters()))
    assert second(torch.randn(5, 3)).isfinite().all()


def test_they_are_drawn_where_ops_are_checked_by_numbers() -> None:
    (found,) = check_numbers(without_parameters(), 0, CheckSettings(threads=1)).tasks
    assert found.unchecked == {}
    assert found.forward_unchecked is None
    assert found.largest_difference < 1e-12
