"""Boxes of tensors: how a checkpoint names the part of a tensor that one of its files has. No torch.

A key in a shard is the tensor's name where it has all of it, and `<name>[first:last,...]`, one range for each
dimension, where it has a part (the notation of files/fragments.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from spindle_cli.files.fragments import Fragment, parse_part_key, part_key


@dataclass(frozen=True)
class Region:
    """Elements [offset, offset + size) of every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def of_fragment(cls, shape: Sequence[int], fragment: Fragment | None) -> Region:
        """A fragment of a tensor of this shape; None: all of it."""
        whole = cls.whole(shape)
        if fragment is None:
            return whole
        return whole.within(fragment.dim, fragment.first, fragment.last)

    def within(self, dim: int, first: int, last: int) -> Region:
        """The part [first, last) of one dimension of this region."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += first
        sizes[dim] = last - first
        return Region(tuple(offsets), tuple(sizes))

    def key(self, name: str, shape: Sequence[int]) -> str:
        """This part's key in a shard; the tensor has this name and this shape."""
        if self == Region.whole(shape):
            return name
        ends = zip(self.offsets, self.sizes, strict=True)
        return part_key(name, [(first, first + size) for first, size in ends])

    def of_range(self, first: int, last: int) -> Iterator[Region]:
        """The boxes that elements [first, last) of this region, counted row by row, make up, in their order.

        At most 2 d - 1 for d dimensions: what is left of a row, whole rows, and the beginning of a row.
        """
        if first >= last:
            return
        if not self.sizes:
            yield self
            return
        row = prod(self.sizes[1:])
        head, tail = -(-first // row), last // row  # whole rows are [head, tail)
        if first % row:
            end = min(last, head * row)
            yield from self._of_row(head - 1, first - (head - 1) * row, end - (head - 1) * row)
        if head < tail:
            yield self.within(0, head, tail)
        if last % row and tail >= head:
            yield from self._of_row(tail, 0, last - tail * row)

    def _of_row(self, index: int, first: int, last: int) -> Iterator[Region]:
        inner = Region(self.offsets[1:], self.sizes[1:])
        for each in inner.of_range(first, last):
            yield Region((self.offsets[0] + index, *each.offsets), (1, *each.sizes))


def parse_region(key: str) -> tuple[str, Region] | None:
    """The tensor's name, and which part of it: what `Region.key` made of a part; None for a plain name."""
    name, ranges = parse_part_key(key)
    ends = [each for each in ranges or () if each is not None]
    if not ends or ranges is None or len(ends) < len(ranges):
        return None
    return name, Region(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
