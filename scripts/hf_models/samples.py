"""Samples that are drawn once: fields of each, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset

SAMPLES = 24
WORDS, LENGTH = 41, 9
IMAGE, PATCH = 12, 4
CLASSES = 3
IGNORED = -100


@dataclass(frozen=True)
class Family:
    """A whole model, its layers' classes, and what draws a sample that its `forward` takes."""

    module: nn.Module
    operators: tuple[type[nn.Module], ...]
    sample: Callable[[Generator], dict[str, Tensor]]


class Samples(Dataset[dict[str, Tensor]]):
    """A fixed number of drawn samples."""

    def __init__(self, sample: Callable[[Generator], dict[str, Tensor]]) -> None:
        generator = torch.Generator().manual_seed(0)
        self._samples = [sample(generator) for _ in range(SAMPLES)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._samples[index]


def words(generator: Generator, length: int = LENGTH) -> Tensor:
    """Token numbers; 0 to 2 have meanings of their own in some models."""
    return torch.randint(3, WORDS, (length,), generator=generator)


def padding(generator: Generator, length: int = LENGTH) -> Tensor:
    """1 for tokens, 0 for padding behind them."""
    tokens = int(torch.randint(length // 2, length + 1, (), generator=generator))
    return (torch.arange(length) < tokens).long()


def label(generator: Generator) -> Tensor:
    """A class."""
    return torch.randint(0, CLASSES, (), generator=generator)


def image(generator: Generator) -> Tensor:
    """Three channels."""
    return torch.randn(3, IMAGE, IMAGE, generator=generator)


def image_label(generator: Generator) -> dict[str, Tensor]:
    """An image and its class."""
    return {"pixel_values": image(generator), "labels": label(generator)}
