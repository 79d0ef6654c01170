"""An operator that keeps things in buffers, in every way that a forward can."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload

WIDTH = 4


class Keeping(nn.Module):
    """Changes buffers in place, one of them in no state_dict, puts another in one's place, and counts."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("largest", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)
        self.calls, self.inputs = 0, []
        turns = torch.polar(torch.ones(WIDTH), torch.linspace(0, 1, WIDTH))
        self.register_buffer("turns", turns if counts else turns.real)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) - self.last
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.mean(0), alpha=0.5)
            self.last.copy_(x[-1])
            self.seen += len(x)
        self.largest = 0.5 * self.largest + x.detach().abs().amax(0)
        if self.counts:
            self.calls += 1
            self.inputs.append(self.calls)
        scale = 1 / (1 + self.calls + len(self.inputs))
        return torch.tanh(x - self.average + scale * self.largest + (self.turns * self.turns).real)


class Model(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.first, self.second = Keeping(counts), Keeping(counts)
        self.register_buffer("unused", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def build(counts: bool) -> Workload:
    """`counts`: in attributes too, and with complex numbers: checkpoints have neither."""
    torch.manual_seed(0)
    items = [{"x": torch.linspace(i, 1, WIDTH)} for i in range(12)]
    return Workload("keeping", [Task("t", Model(counts), 4, items)], (Keeping,))
