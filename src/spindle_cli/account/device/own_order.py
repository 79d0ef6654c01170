"""In which order devices run the passes of slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from spindle_cli.account.edges import order_passes
from spindle_cli.account.types import Edge, Pass
from spindle_cli.costs.memory import SliceShape


@dataclass(frozen=True, eq=False)
class OwnOrder:
    """All passes of a plan, in the order in which devices run their own.

    `mirrors`: all slices run forward, and then all backward in reverse.
    """

    passes: Sequence[Pass]
    mirrors: bool

    @classmethod
    def of(cls, slices: Sequence[SliceShape], edges: Sequence[Edge]) -> OwnOrder:
        """Of slices in order of start, with the edges between them."""
        if all(piece.backward_start_s is None for piece in slices):
            there = range(len(slices))
            forward = [Pass(index, is_backward=False) for index in there]
            backward = [Pass(index, is_backward=True) for index in reversed(there)]
            return cls([*forward, *backward], mirrors=True)
        return cls(order_passes(slices, edges), mirrors=False)

    def by_device(self, slices: Sequence[SliceShape], num_devices: int) -> list[list[Pass]] | None:
        """Of each device its passes; None where they are mirrored."""
        if self.mirrors:
            return None
        passes: list[list[Pass]] = [[] for _ in range(num_devices)]
        for each in self.passes:
            for device in slices[each.piece].devices:
                passes[device].append(each)
        return passes

    @cached_property
    def forward_at(self) -> Sequence[int]:
        """Of each slice, the place of its forward pass among all passes."""
        return self._places(is_backward=False)

    @cached_property
    def backward_at(self) -> Sequence[int]:
        """The same of its backward pass."""
        return self._places(is_backward=True)

    def place_of(self, each: Pass) -> int:
        """The place of a pass among all."""
        return (self.backward_at if each.is_backward else self.forward_at)[each.piece]

    def _places(self, *, is_backward: bool) -> Sequence[int]:
        places = [0] * (len(self.passes) // 2)
        for number, each in enumerate(self.passes):
            if each.is_backward == is_backward:
                places[each.piece] = number
        return places
