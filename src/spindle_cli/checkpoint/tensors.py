"""What a process holds, or wants, of the tensors of a checkpoint.

A tensor is known by its name (names.py) and its whole shape; a process has parts of it, each a box.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from spindle_cli.checkpoint.names import Region


@dataclass(frozen=True)
class Part:
    """A box of a tensor. `tensor`: its elements, in the region's shape."""

    region: Region
    tensor: Tensor


@dataclass(frozen=True)
class HeldTensor:
    """Parts of a tensor whose whole shape is `shape`."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> HeldTensor:
        """All of it."""
        shape = tuple(tensor.shape)
        return cls(shape, (Part(Region.whole(shape), tensor),))

    @property
    def dtype(self) -> torch.dtype:
        """The type of every part."""
        return self.parts[0].tensor.dtype


class HeldTensors:
    """Tensors by name; parts of the same one are put together."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[Part]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """All of a tensor."""
        self.add_part(name, tuple(tensor.shape), Region.whole(tensor.shape), tensor)

    def add_part(
        self,
        name: str,
        shape: tuple[int, ...],
        region: Region,
        tensor: Tensor,
        elements: tuple[int, int] | None = None,
    ) -> None:
        """A part of a tensor.

        Args:
            name, shape: of the whole tensor.
            region: a box of it.
            tensor: the box's elements; in its shape, or with `elements` a vector of those.
            elements: only [first, last) of the box's elements, counted row by row.
        """
        assert self._shapes.setdefault(name, shape) == shape, f"{name} has one shape"
        parts = self._parts.setdefault(name, [])
        if elements is None:
            parts.append(Part(region, tensor.detach()))
        else:
            parts.extend(_boxes(region, tensor.detach(), elements))

    def by_name(self) -> dict[str, HeldTensor]:
        """What was added."""
        return {
            name: HeldTensor(self._shapes[name], tuple(parts)) for name, parts in self._parts.items() if parts
        }


def _boxes(region: Region, vector: Tensor, elements: tuple[int, int]) -> Iterator[Part]:
    begin = 0
    for box in region.of_range(*elements):
        size = prod(box.sizes)
        yield Part(box, vector[begin : begin + size].view(box.sizes))
        begin += size
