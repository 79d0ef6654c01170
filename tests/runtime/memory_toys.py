"""A workload large enough that its activations count, and small enough to train in a moment."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import DecoderLayer, EncoderLayer, Mlp

WIDTH, TOKENS, PATCH, WORDS = 64, 24, 32, 3000
_PAIR = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}
_MLP = {"mlp.up": "colwise", "mlp.down": "rowwise"}


class Pictures(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return {
            "image": torch.randn(TOKENS, PATCH, generator=drawn),
            "target": torch.randn(TOKENS, WIDTH, generator=drawn),
        }


class Texts(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        words = torch.randint(WORDS, (TOKENS,), generator=drawn)
        return {"words": words, "labels": words.roll(-1)}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer(WIDTH, 4) for _ in range(4))

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image)
        for layer in self.layers:
            x = layer(x)
        return x


class Describe(nn.Module):
    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower
        self.head = Mlp(WIDTH, WIDTH)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        return (self.head(self.tower(image)) - target).square().mean()


class Translate(nn.Module):
    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower
        self.layers = nn.ModuleList(DecoderLayer(WIDTH, 4) for _ in range(2))
        self.head = nn.Linear(WIDTH, PATCH)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        context = self.tower(image)
        x = target
        for layer in self.layers:
            x = layer(x, context)
        return (self.head(x) - image).square().mean()


class Write(nn.Module):
    """Its logits are most of what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer(WIDTH, 4) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build() -> Workload:
    """Two tasks over one tower, one of them with a decoder of its own; and one with many words."""
    tower = Tower()
    attention = {f"attention.{name}": way for name, way in _PAIR.items()}
    cross = {f"cross_attention.{name}": way for name, way in _PAIR.items()}
    return Workload(
        name="memory",
        tasks=[
            Task("describe", Describe(tower), 16, Pictures()),
            Task("translate", Translate(tower), 8, Pictures()),
            Task("write", Write(), 8, Texts()),
        ],
        operators=(EncoderLayer, DecoderLayer),
        tp_plans={EncoderLayer: {**attention, **_MLP}, DecoderLayer: {**attention, **cross, **_MLP}},
    )
