"""Workloads that only the check of a GPU trains: layers with dropout, evaluated; a stack of wide layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import EncoderLayer
from spindle_cli.zoo.synthetic import Field, FloatField, LabelField, SyntheticDataset, TokenField

CLASSES, WORDS = 16, 256


class Noisy(nn.Module):
    """A layer with dropout."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.map, self.norm, self.dropout = nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] -> [B, width]."""
        added: Tensor = self.dropout(torch.relu(self.map(self.norm(x))))
        return x + added


class Classifier(nn.Module):
    """Layers, and the class of a sample."""

    def __init__(self, layers: nn.ModuleList, width: int) -> None:
        super().__init__()
        self.layers, self.head = layers, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        """[B, width], and class numbers [B] -> scalar loss."""
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), label)


class Stack(nn.Module):
    """Transformer layers over words, and the class of a text."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(EncoderLayer(width, max(1, width // 64)) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, text: Tensor, label: Tensor) -> Tensor:
        """Token numbers [B, tokens], and class numbers [B] -> scalar loss."""
        x = self.words(text)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x.mean(dim=1)), label)


def noisy(width: int = 64, layers: int = 6, rate: float = 0.1) -> Workload:
    """Two tasks over layers with dropout, of which they share the first half."""
    shared = [Noisy(width, rate) for _ in range(layers // 2)]
    tasks = []
    for name, samples in (("one", 16), ("other", 8)):
        own = [Noisy(width, rate) for _ in range(layers - layers // 2)]
        fields: dict[str, Field] = {"x": FloatField((width,)), "label": LabelField(CLASSES)}
        tasks.append(
            Task(
                name,
                Classifier(nn.ModuleList([*shared, *own]), width),
                samples,
                SyntheticDataset(fields, 4096),
                eval_dataset=SyntheticDataset(fields, 37),
            )
        )
    return Workload("noisy", tasks, operators=(Noisy,))


def stack(width: int = 4096, layers: int = 6, tokens: int = 1024, samples: int = 16) -> Workload:
    """One task over a stack of transformer layers."""
    fields: dict[str, Field] = {"text": TokenField(tokens, WORDS), "label": LabelField(CLASSES)}
    task = Task("stack", Stack(width, layers), samples, SyntheticDataset(fields, 1024))
    return Workload("stack", [task], operators=(EncoderLayer,))
