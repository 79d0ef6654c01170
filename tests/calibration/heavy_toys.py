"""Two tasks whose layers take milliseconds on a core, so that they are most of an iteration."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from spindle_cli.workload.types import Task, Workload

WIDTH = 768


class Samples(Dataset[dict[str, Tensor]]):
    """Random rows."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((WIDTH,), index / 128)}


class Layer(nn.Module):
    """A wide one, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.relu(self.wide(x)))


class Net(nn.Module):
    """`count` layers, and the mean of what they make."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def build() -> Workload:
    tasks = [Task(name, Net(count), batch_size=64, dataset=Samples()) for name, count in (("a", 2), ("b", 4))]
    return Workload("heavy", tasks, operators=(Layer,))
