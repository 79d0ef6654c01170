"""What stands in for the tensors of ops that are timed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from spindle_cli.analysis.analyse import analyse
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.profile.op.jobs import OpRef
from spindle_cli.profile.op.stand_ins import give_parameters
from spindle_cli.workload.building.load import Births, parameters_born
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


class Writing(Layer):
    """Writes what it is given into the parameter that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def __setattr__(self, name: str, value: object) -> None:
        held = self.__dict__.get("_parameters", {})
        if name in held and isinstance(value, torch.Tensor):
            with torch.no_grad():
                held[name].copy_(value)
        else:
            super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def without_parameters(kind: type[Layer] = Layer) -> WorkloadGraph:
    with parameters_born(Births(), keep=lambda _: False):
        net = Net()
        net.layers = nn.Sequential(kind(), kind())
    assert all(buffer.is_meta for buffer in net.buffers())
    task = Task("t", net, 2, [{"x": torch.randn(3)} for _ in range(4)])
    return analyse(Workload("w", [task], operators=(Layer,)))


@pytest.mark.parametrize("kind", [Layer, Writing])
def test_parameters_and_buffers_made_of_them_are_real_where_their_op_is_timed(kind: type[Layer]) -> None:
    graph = without_parameters(kind)
    give_parameters(graph, [OpRef(task="t", op=1)])
    first, second = graph.tasks["t"].root.layers
    assert all(tensor.is_meta for tensor in (*first.buffers(), *first.parameters()))
    assert not any(tensor.is_meta for tensor in (*second.buffers(), *second.parameters()))
    assert second(torch.randn(5, 3)).isfinite().all()


@pytest.mark.parametrize("kind", [Layer, Writing])
def test_they_are_drawn_where_ops_are_checked_by_numbers(kind: type[Layer]) -> None:
    (found,) = check_numbers(without_parameters(kind), 0, CheckSettings(threads=1)).tasks
    assert found.unchecked == {}
    assert found.forward_unchecked is None
    assert found.largest_difference < 1e-12
