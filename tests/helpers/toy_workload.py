"""A small workload with what is hard to compare: shared parameters, and attention with key biases."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import Dataset

from spindle_cli.workload.types import Task, Workload

WIDTH = 16
CLASSES = 4


class Samples(Dataset[dict[str, Tensor]]):
    """Random tokens with labels."""

    def __init__(self, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.x = torch.randn(40, 6, WIDTH, generator=drawn)
        self.label = torch.randint(0, CLASSES, (40,), generator=drawn)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "label": self.label[index]}


class Block(nn.Module):
    """Attention twice: with the key's bias inside a tensor, and as its own; its true gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        scores = x @ self.key(x).transpose(1, 2) / WIDTH**0.5
        return x + scores.softmax(-1) @ x


class Head(nn.Module):
    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.classify = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(self.classify(x.mean(1)), label)


class Classify(nn.Module):
    def __init__(self, blocks: nn.ModuleList, dropout: float, classes: int = CLASSES) -> None:
        super().__init__()
        self.blocks = blocks
        self.dropout = nn.Dropout(dropout)
        self.head = Head(classes)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x), label)


def build(dropout: float = 0.0, classes: int = CLASSES, ended: str = "") -> Workload:
    """`ended`: a task that is left out."""
    blocks = nn.ModuleList(Block() for _ in range(2))
    tasks = [
        Task("large", Classify(blocks, dropout, classes), batch_size=8, dataset=Samples(1)),
        Task("small", Classify(blocks, dropout, classes), batch_size=4, dataset=Samples(2), weight=0.5),
    ]
    return Workload("toy", [task for task in tasks if task.name != ended], operators=(Block, Head))
