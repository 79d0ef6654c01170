"""Two tasks over one tower of four layers, which a plan may run in every way that it can say: an embedding
has a gradient that can be gathered, and layers can be split, with experts or without.
"""

from __future__ import annotations

import routed_toys
import split_toys
import torch
import torch.nn.functional as functional
from runtime_toys import CLASSES, WIDTH
from torch import Tensor, nn
from torch.utils.data import Dataset

from spindle_cli.workload.types import Task, Workload

WORDS, TOKENS, BATCH = 128, 4, 12


class Sentences(Dataset[dict[str, Tensor]]):
    """Words with a label."""

    def __init__(self, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, WORDS, (4 * BATCH, TOKENS), generator=drawn)
        self.label = torch.randint(0, CLASSES, (4 * BATCH,), generator=drawn)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"words": self.words[index], "label": self.label[index]}


class Reader(nn.Module):
    """An embedding and the tower, which both tasks have, and a head of its own."""

    def __init__(self, embed: nn.Embedding, tower: nn.ModuleList) -> None:
        super().__init__()
        self.embed = embed
        self.tower = tower
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor, label: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.tower:
            x = layer(x)
        return functional.cross_entropy(self.head(x.mean(1)), label)


class Router(Reader):
    """The same over layers with experts, which also say how unevenly they were asked."""

    def forward(self, words: Tensor, label: Tensor) -> Tensor:
        x = self.embed(words)
        balance = x.new_zeros(x.shape[0])
        for layer in self.tower:
            x, balance = layer(x, balance)
        return functional.cross_entropy(self.head(x.mean(1)), label) + 0.01 * balance.mean()


def build(experts: bool = False) -> Workload:
    """Tasks `a` and `b`; `experts`: in every layer."""
    layer, reader = (routed_toys.Layer, Router) if experts else (split_toys.Layer, Reader)
    plan = {"mixture.experts": "expertwise"} if experts else split_toys.PLAN
    embed, tower = nn.Embedding(WORDS, WIDTH), nn.ModuleList(layer() for _ in range(4))
    return Workload(
        name="pairs",
        tasks=[
            Task("a", reader(embed, tower), BATCH, Sentences(1)),
            Task("b", reader(embed, tower), BATCH, Sentences(2), weight=0.5),
        ],
        operators=(layer, nn.Embedding),
        tp_plans={layer: plan},
    )
