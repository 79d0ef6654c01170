"""What stands in for the tensors of ops that are timed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from spindle_cli.profile.op.jobs import OpRef
from spindle_cli.profile.op.stand_ins import give_parameters
from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.building.abstract import Births, parameters_born
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


def test_buffers_that_were_made_of_parameters_are_real_where_their_op_is_timed() -> None:
    with parameters_born(Births(), keep=lambda _: False):
        net = Net()
    assert all(buffer.is_meta for buffer in net.buffers())
    task = Task("t", net, 2, [{"x": torch.randn(3)} for _ in range(4)])
    give_parameters(analyse(Workload("w", [task], operators=(Layer,))), [OpRef(task="t", op=1)])
    first, second = net.layers
    assert all(tensor.is_meta for tensor in (*first.buffers(), *first.parameters()))
    assert not any(tensor.is_meta for tensor in (*second.buffers(), *second.parameters()))
    assert second(torch.randn(5, 3)).isfinite().all()
