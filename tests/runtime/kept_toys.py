"""Layers that keep tables, a teacher that forward puts into eval mode, and counters that nobody reads."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload

WIDTH, LENGTH = 4, 5


def angles(count: int) -> Tensor:
    """Numbers that float32 has as float64 does: some are made in one process, some in another."""
    return torch.arange(count)[:, None] * torch.arange(1, WIDTH + 1) / 8


@functools.lru_cache(maxsize=4)
def remembered(count: int) -> Tensor:
    return angles(count) / 4


class Layer(nn.Module):
    """Its tables have two rows and grow with its first batch; `saved`: one of them is in checkpoints."""

    def __init__(self, saved: bool) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.make(2, saved)
        self.saved, self.calls = saved, 0
        self.by_type: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    def make(self, count: int, saved: bool) -> None:
        self.register_buffer("table", angles(count).square() / 4 - 1, persistent=saved)
        self.cached = count

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        count = x.shape[1]
        if count > self.cached:
            self.make(count, self.saved)
        key = count, x.device, x.dtype
        if key not in self.by_type:
            self.by_type[key] = 1 - angles(count).to(x)
        turned = self.linear(x * self.table[:count].to(x)) + self.by_type[key] * remembered(count).to(x)
        return x + self.dropout(torch.tanh(turned))


class Distilled(nn.Module):
    def __init__(self, saved: bool) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(saved), Layer(saved))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        for layer in self.student[1:]:
            layer.dropout.p = 0.0
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.teacher.eval()
        self.steps += 1
        with torch.no_grad():
            target = self.teacher(x)
        return (self.student(x.flip(1)) - target - x).square().mean()


def build(saved: bool = False) -> Workload:
    torch.manual_seed(0)
    items = [{"x": torch.linspace(i, 1, LENGTH * WIDTH).view(LENGTH, WIDTH)} for i in range(12)]
    task = Task("t", Distilled(saved), 4, items, eval_dataset=items[:4])
    return Workload("kept", [task], (Layer,))
