"""Data as other people's classes give them: with a curriculum by epoch."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from spindle_cli.workload.types import Task, Workload

WIDTH = 6


class Curriculum(Dataset[dict[str, Tensor]]):
    """Samples that get harder from epoch to epoch, with targets that are drawn anew in each."""

    epoch = 0

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, WIDTH)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.shift = torch.rand(len(self.x), 1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index] * (1 + self.epoch), "y": self.shift[index]}


class Steady(Curriculum):
    """The same without draws, which a thread reads ahead."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.shift = (self.x[:, :1] + epoch).sin()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(self.head(x), y)


def build_epochs() -> Workload:
    """Epochs of one step, of three, and of two."""
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer() for _ in range(2)])
    tasks = [
        Task("drawn", Net(layers), 4, Curriculum(5)),
        Task("steady", Net(layers), 4, Subset(Steady(14), range(1, 13))),
        Task("loaded", Net(layers), 4, ConcatDataset([Steady(3), Curriculum(5)])),
    ]
    return Workload(name="epochs", tasks=tasks, operators=(Layer,))
