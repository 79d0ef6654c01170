"""What one rank's optimizer steps: whole parameters, and its ranges of those that it shares with others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

Elements = tuple[int, int]  # [first, last) of a flattened parameter

# Parameters and ranges start at multiples of this, where kernels with vector instructions are fastest.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class OwnedRange:
    """Elements of a parameter that this rank's optimizer steps.

    Attributes:
        name: of the parameter.
        part: elements [first, last) of the flattened parameter; None: all of it.
        tensor: the parameter itself where `part` is None; else a vector over part of its memory. After the
            gradient sums `tensor.grad` is the whole iteration's gradient, or None where no rank's backward
            pass reached the parameter.
        counted: in the gradients' global norm and in checkpoints; of equal owned ranges of several ranks
            only the first rank's is.
    """

    name: str
    part: Elements | None
    tensor: nn.Parameter
    counted: bool = True


@dataclass(frozen=True)
class FlatLayout:
    """How parameters lie in one flat tensor that some ranks own ranges of, equal ones or by their weights.

    Attributes:
        spans: elements [first, last) of each parameter, by name, ascending.
        range_size: elements of each rank's range, where these are equal.
        count: how many ranges there are.
        cuts: where these are not equal, the elements at which they begin, and the end; else empty.
    """

    spans: Mapping[str, tuple[int, int]]
    range_size: int
    count: int
    cuts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, sizes: Mapping[str, int], itemsize: int, count: int, weights: Sequence[int] = ()
    ) -> FlatLayout:
        """Lay out parameters of these numbers of elements, in their order.

        Args:
            weights: of the ranges, each in proportion to its own, to a multiple of the alignment; none: they
                are equal. A range of a small tensor may be empty.
        """
        step = alignment(itemsize)
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, size in sizes.items():
            spans[name] = (end, end + size)
            end = round_up(end + size, step)
        if not weights:
            return cls(spans, round_up(-(-end // count), step), count)
        steps, total = end // step, sum(weights)
        cuts = [steps * before // total * step for before in accumulate(weights, initial=0)]
        return cls(spans, 0, count, tuple(cuts))

    @property
    def size(self) -> int:
        """Elements of the flat tensor; those in no span are padding."""
        return self.cuts[-1] if self.cuts else self.range_size * self.count

    def range_of(self, position: int) -> tuple[int, int]:
        """Elements [first, last) that the `position`-th rank owns."""
        if self.cuts:
            return self.cuts[position], self.cuts[position + 1]
        return position * self.range_size, (position + 1) * self.range_size

    def owned(self, position: int) -> Iterator[tuple[str, int, int]]:
        """(name, first, last) of each parameter's elements in the `position`-th range, counted from the
        parameter's first.
        """
        low, high = self.range_of(position)
        for name, (first, last) in self.spans.items():
            start, end = max(first, low), min(last, high)
            if start < end:
                yield name, start - first, end - first


def alignment(itemsize: int) -> int:
    """Elements of this size at multiples of which parameters and ranges start."""
    return max(1, _ALIGNMENT_BYTES // itemsize)


def round_up(number: int, step: int) -> int:
    """The least multiple of `step` that is no less."""
    return -(-number // step) * step
