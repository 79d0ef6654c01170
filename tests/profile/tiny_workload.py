"""Two tasks that share an encoder of equal layers, small enough to be profiled in a moment."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from spindle_cli import Task, Workload

WIDTH = 8
DEPTH = 4


class Items(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int = 32) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((WIDTH,), index / 32), "label": torch.tensor(index % 3)}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.linear(x))


class Pairwise(nn.Module):
    """A loss in which every sample meets every other."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.T).square().mean()


class Classify(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x), label)


class Spread(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.loss = Pairwise()

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.loss(x) + 0 * label.sum()


def build() -> Workload:
    layers = nn.ModuleList(Layer() for _ in range(DEPTH))
    return Workload(
        name="tiny",
        tasks=[
            Task("classify", Classify(layers), 16, Items()),
            Task("spread", Spread(layers), 8, Items()),
        ],
        operators=(Layer, Pairwise),
        coupled=(Pairwise,),
    )


def build_changed() -> Workload:
    """One task has ended, another one was added, whose batch has a share that no other has."""
    layers = nn.ModuleList(Layer() for _ in range(DEPTH))
    tasks = [Task("classify", Classify(layers), 16, Items()), Task("again", Classify(layers), 32, Items())]
    return Workload(name="tiny", tasks=tasks, operators=(Layer,))


def build_large(batch_size: int = 2**17) -> Workload:
    """One task with a large batch."""
    layers = nn.ModuleList(Layer() for _ in range(DEPTH))
    task = Task("classify", Classify(layers), batch_size, Items(batch_size))
    return Workload(name="large", tasks=[task], operators=(Layer,))


class Rooted(Classify):
    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return super().forward(x, label).sqrt()


def build_rooted() -> Workload:
    """A loss that shares of a batch cannot compute, which the workload does not say."""
    layers = nn.ModuleList(Layer() for _ in range(DEPTH))
    return Workload(name="rooted", tasks=[Task("classify", Rooted(layers), 8, Items())], operators=(Layer,))
