"""Whether a change in place reads what it writes: what torch gives depends on which entry comes first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spindle_cli.workload.tracing.observe import storage_of

_FEW = 2  # of many rows: if any of them meet, a row meets the next one


@dataclass(frozen=True)
class _Place:
    """Where a tensor's entries lie in memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def end(self) -> int:
        steps = (size - 1 for size in self.sizes)
        return self.first + 1 + sum(step * stride for step, stride in zip(steps, self.strides, strict=True))

    def in_few_rows(self, stride: int) -> _Place:
        pairs = zip(self.sizes, self.strides, strict=True)
        sizes = tuple(min(size, _FEW) if own == stride else size for size, own in pairs)
        return replace(self, sizes=sizes)


def reads_what_it_writes(written: Tensor, read: Iterable[Tensor]) -> bool:
    """Whether tensors have entries of another one that is changed, at other places than it has them."""
    storage, place = storage_of(written), _Place.of(written)
    others = [_Place.of(tensor) for tensor in read if storage_of(tensor) == storage]
    return any(other != place and _meet(place, other) for other in others)


def _meet(one: _Place, other: _Place) -> bool:
    if 0 in (*one.sizes, *other.sizes):
        return False
    widest = [max((0, *place.strides)) for place in (one, other)]
    if widest[0] == widest[1] and abs(one.first - other.first) < widest[0]:
        one, other = one.in_few_rows(widest[0]), other.in_few_rows(widest[0])
    first = min(one.first, other.first)
    memory = torch.zeros(max(one.end, other.end) - first, dtype=torch.bool)
    memory.as_strided(one.sizes, one.strides, one.first - first).fill_(True)
    return bool(memory.as_strided(other.sizes, other.strides, other.first - first).any())
