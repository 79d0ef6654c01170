"""Small models in the shapes that users' models have, used by the tests of this package."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import Dataset

from helpers.layers import Block
from spindle_cli.workload.types import Task, Workload

WIDTH = 8


class Items(Dataset[dict[str, Tensor]]):
    """`count` samples with named fields: floats by shape, integers by (shape, number of classes)."""

    def __init__(
        self, count: int = 32, seed: int = 0, **fields: tuple[int, ...] | tuple[tuple[int, ...], int]
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.data: dict[str, Tensor] = {}
        for name, spec in fields.items():
            if spec and isinstance(spec[0], tuple):
                self.data[name] = torch.randint(0, int(spec[1]), (count, *spec[0]), generator=generator)
            else:
                self.data[name] = torch.randn(count, *spec, generator=generator)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.data.items()}


class Tower(nn.Module):
    """Embedding glue, a chain of blocks, a pooling head."""

    def __init__(self, width_in: int = 6, depth: int = 3, width: int = WIDTH, out: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(width_in, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class TwoTowers(nn.Module):
    """A contrastive loss written in plain glue."""

    def __init__(self, vision: Tower, text: Tower) -> None:
        super().__init__()
        self.vision = vision
        self.text = text
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        left = functional.normalize(self.vision(image), dim=-1)
        right = functional.normalize(self.text(words), dim=-1)
        logits = left @ right.T * self.scale
        labels = torch.arange(image.shape[0])
        return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


class Classifier(nn.Module):
    """One tower with a mean loss in glue."""

    def __init__(self, tower: Tower, classes: int = 4) -> None:
        super().__init__()
        self.tower = tower
        self.classify = nn.Linear(WIDTH, classes)

    def forward(self, image: Tensor, label: Tensor) -> dict[str, Tensor]:
        logits = self.classify(self.tower(image))
        return {"loss": functional.cross_entropy(logits, label), "logits": logits}


def two_tasks() -> Workload:
    """A contrastive and a classification task over one shared tower."""
    torch.manual_seed(0)
    vision, text = Tower(), Tower(5, depth=2)
    pairs = Items(image=(4, 6), words=(3, 5))
    labelled = Items(image=(4, 6), label=((), 4))
    return Workload(
        name="toy",
        tasks=[
            Task("image_text", TwoTowers(vision, text), 8, pairs),
            Task("classify", Classifier(vision), 4, labelled, weight=0.5),
        ],
        operators=(Block,),
    )
