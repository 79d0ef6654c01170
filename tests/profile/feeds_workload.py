"""Two tasks of feed-forward layers; those of one change in place what their first map gives."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from spindle_cli import Task, Workload

WIDTH, BATCH = 64, 4096


class Items(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((WIDTH,), index / BATCH), "label": torch.tensor(index % 3)}


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


class Changing(Feed):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm(x)).mul_(2.0)))
        return out


class Classify(nn.Module):
    def __init__(self, kind: type[Feed]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x), label)


def build() -> Workload:
    return Workload(
        name="feeds",
        tasks=[
            Task("feed", Classify(Feed), BATCH, Items()),
            Task("change", Classify(Changing), BATCH, Items()),
        ],
        operators=(Feed, Changing),
    )
