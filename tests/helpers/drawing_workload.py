"""A workload with chance everywhere: dropout, noise inside of a layer, random samples."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import Dataset

from spindle_cli.workload.types import Task, Workload

WIDTH = 16
CLASSES = 4


class Drawn(Dataset[dict[str, Tensor]]):
    """One draw goes into both fields of a sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        shift = torch.randint(0, CLASSES, ())
        return {"x": torch.randn(6, WIDTH) + shift, "label": (index + shift) % CLASSES}


class Block(nn.Module):
    """Dropout and noise, and a matrix that is made anew in the default type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) @ torch.eye(WIDTH)
        return x + functional.dropout(torch.tanh(y), 0.2) + 0.1 * torch.randn_like(y)


class Net(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean(1)), label)


def build() -> Workload:
    """Two tasks over the same blocks."""
    blocks = nn.ModuleList(Block() for _ in range(2))
    tasks = [Task("large", Net(blocks), 8, Drawn()), Task("small", Net(blocks), 4, Drawn())]
    return Workload("drawing", tasks, operators=(Block,))
