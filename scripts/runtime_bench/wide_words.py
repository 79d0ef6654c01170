"""A workload whose parameters are nearly all of an embedding and a wide layer; for bench_gradient_sums.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from spindle_cli.workload.types import Task, Workload

WORDS, WIDTH, LENGTH, WIDE, CLASSES = 20_000, 64, 12, 1024, 10


class Bags(Dataset[dict[str, Tensor]]):
    """Random words with labels."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(3)
        self.words = torch.randint(0, WORDS, (256, LENGTH), generator=drawn)
        self.label = torch.randint(0, CLASSES, (256,), generator=drawn)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"words": self.words[index], "label": self.label[index]}


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        rows: Tensor = self.words(words)
        return rows.flatten(1)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(LENGTH * WIDTH, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.map(x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Linear(WIDE, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(self.classify(x), label)


class Classify(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lookup, self.dense, self.head = Lookup(), Dense(), Head()

    def forward(self, words: Tensor, label: Tensor) -> Tensor:
        loss: Tensor = self.head(self.dense(self.lookup(words)), label)
        return loss


def build() -> Workload:
    """One task, of batches of 16."""
    return Workload("wide-words", [Task("bags", Classify(), 16, Bags())], operators=(Lookup, Dense, Head))
