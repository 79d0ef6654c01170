"""Tensors that a module holds as plain attributes take memory like its buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spindle_cli.analysis.analyse import analyse
from spindle_cli.profile.parameters.sizes import attribute_bytes, parameter_sizes
from spindle_cli.workload.types import Task, Workload


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.table = torch.ones(3, 4)
        self.tables = [self.table, torch.ones(5, dtype=torch.int64), self.scale]
        self.by_name = {"a": torch.ones(7, dtype=torch.uint8), "b": self.linear.weight}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.table.sum(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = Held()

    def forward(self, x: Tensor) -> Tensor:
        return self.held(x).square().mean()


ATTRIBUTES = 12 * 4 + 5 * 8 + 7


def test_every_tensor_is_counted_once_and_no_parameter_or_buffer() -> None:
    assert attribute_bytes(Held()) == ATTRIBUTES
    assert attribute_bytes(nn.Sequential(Held(), nn.Linear(2, 2), Held())) == 2 * ATTRIBUTES
    assert attribute_bytes(nn.LSTM(4, 4)) == 0  # it keeps a list of its parameters


def test_an_op_holds_them_beside_its_parameters_and_trains_none() -> None:
    graph = analyse(Workload("w", [Task("t", Model(), 2, [{"x": torch.ones(4)}] * 4)], (Held,)))
    sizes = parameter_sizes(graph.tasks["t"], graph.tasks["t"].ops, lambda _: None)
    trained = (16 + 4) * 4
    assert (sizes.layer_bytes, sizes.extra_bytes) == (trained + 16 + ATTRIBUTES, {})
    assert sizes.trained_share == trained / (trained + 16 + ATTRIBUTES)
