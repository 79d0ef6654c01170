"""A workload whose losses say whether cuDNN may round float32 numbers: 1 where it may, else 0."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload


class Block(nn.Module):
    """An operator that asks when it runs, which a trace does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + float(torch.backends.cudnn.allow_tf32)


class Net(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


def build() -> Workload:
    """Two tasks over the same block, whose samples are zeros."""
    blocks = nn.ModuleList([Block()])
    samples = [{"x": torch.zeros(2)} for _ in range(8)]
    tasks = [Task("large", Net(blocks), 4, samples), Task("small", Net(blocks), 2, samples)]
    return Workload("tf32", tasks, operators=(Block,))
