"""Synthetic data sets: item i is always the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True)
class FloatField:
    """A tensor of normally distributed numbers."""

    shape: tuple[int, ...]

    def draw(self, generator: torch.Generator) -> Tensor:
        """One sample's tensor, float32."""
        return torch.randn(self.shape, generator=generator)


@dataclass(frozen=True)
class TokenField:
    """`length` token numbers below `vocabulary`."""

    length: int
    vocabulary: int

    def draw(self, generator: torch.Generator) -> Tensor:
        """One sample's tokens, int64 [length]."""
        return torch.randint(self.vocabulary, (self.length,), generator=generator)


@dataclass(frozen=True)
class LabelField:
    """One of `classes`."""

    classes: int

    def draw(self, generator: torch.Generator) -> Tensor:
        """One sample's class, int64 []."""
        return torch.randint(self.classes, (), generator=generator)


Field = FloatField | TokenField | LabelField


# Samples that are drawn; later ones repeat them. Drawing each anew would take longer than training on it.
_DISTINCT = 64


class SyntheticDataset(Dataset[dict[str, Tensor]]):
    """`size` samples with the given fields, some of them distinct; costs nothing until an item is taken."""

    def __init__(self, fields: Mapping[str, Field], size: int = 1_000_000) -> None:
        self.fields = dict(fields)
        self.size = size
        self._drawn: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of a data set of {self.size}")
        number = index % _DISTINCT
        if number not in self._drawn:
            generator = torch.Generator().manual_seed(number)
            self._drawn[number] = {name: field.draw(generator) for name, field in self.fields.items()}
        return dict(self._drawn[number])
