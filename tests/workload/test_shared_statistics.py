"""Buffers that several ops change are told before training: no device's will be those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.rules.batch_norms import shared_statistics
from spindle_cli.workload.types import Task, Workload


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("constant", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.add_(x.mean(0))
        return x * self.constant


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def lines(*models: Model) -> tuple[str, ...]:
    items = [{"x": torch.randn(4)} for _ in range(8)]
    tasks = [Task(name, model, 4, items) for name, model in zip("abc", models, strict=False)]
    return shared_statistics(analysed(Workload("w", tasks, (Block,), coupled=())))


def test_statistics_of_one_norm_in_two_tasks_are_told_once() -> None:
    shared = Block(nn.BatchNorm1d(4))
    (line,) = lines(Model(shared, Block(nn.LayerNorm(4))), Model(shared))
    names = "a.blocks.0.norm.running_mean, a.blocks.0.norm.running_var, a.blocks.0.norm.num_batches_tracked"
    assert line.startswith(f"{names}: changed by the forward passes of tasks a and b, of which each device")
    assert "in eval mode" in line


def test_statistics_of_one_norm_in_two_places_of_a_task_are_told() -> None:
    norm = nn.BatchNorm1d(4)
    (line,) = lines(Model(Block(norm), Block(norm)))
    assert "changed by the forward passes of 2 ops of task a" in line and "let one operator make" in line


def test_a_buffer_that_forward_itself_changes_is_told_and_no_constant_beside_it() -> None:
    shared = Block(Counting())
    (line,) = lines(Model(shared), Model(shared))
    assert line.startswith("a.blocks.0.norm.average: changed")


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4, track_running_stats=False), nn.LayerNorm(4)]
)
def test_what_keeps_no_statistics_is_not_told(norm: nn.Module) -> None:
    shared = Block(norm)
    assert lines(Model(shared), Model(shared)) == ()


def test_statistics_of_one_op_are_not_told() -> None:
    assert lines(Model(Block(nn.BatchNorm1d(4))), Model(Block(nn.BatchNorm1d(4)))) == ()
