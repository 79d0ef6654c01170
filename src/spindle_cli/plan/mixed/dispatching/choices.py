"""What a MetaOp may run on while some devices are free, by the prices of these."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Choices:
    """Of a node's allocations those that some free devices have room for, by some prices.

    Attributes:
        fastest_first: the allocations, of equally fast ones the first first.
        op_s: what an op takes on each of these, ascending.
    """

    def __init__(self, fastest_first: Sequence[int], op_s: Sequence[float], cost: Sequence[float]) -> None:
        self.fastest_first = fastest_first
        self.op_s = [op_s[point] for point in fastest_first]
        corners = _hull(fastest_first, op_s, cost)
        self._corners = [corner.point for corner in corners]
        self._corners_s = [corner.op_s for corner in corners]

    def mixed(self, seconds: float) -> tuple[int, float] | None:
        """What is worth least of all whose ops take so long on average, or less: some ops on one allocation,
        and the others on a slower one that is worth less. The faster allocation, and its share of the ops;
        None if an op takes longer on all.
        """
        count = bisect_right(self._corners_s, seconds)
        if not count:
            return None
        if count == len(self._corners):
            return self._corners[-1], 1.0
        faster_s, slower_s = self._corners_s[count - 1 : count + 1]
        return self._corners[count - 1], (slower_s - seconds) / (slower_s - faster_s)


class _Corner(NamedTuple):
    op_s: float
    cost: float
    point: int


def _hull(fastest_first: Sequence[int], op_s: Sequence[float], cost: Sequence[float]) -> list[_Corner]:
    """Of allocations in the plane of seconds and cost, the corners of the lower convex hull as far as cost
    falls: mixes of any others cost at least as much.
    """
    corners: list[_Corner] = []
    for point in fastest_first:
        own = _Corner(op_s[point], cost[point], point)
        if corners and own.cost >= corners[-1].cost:
            continue
        while len(corners) > 1 and not _is_below(corners[-1], corners[-2], own):
            corners.pop()
        corners.append(own)
    return corners


def _is_below(between: _Corner, faster: _Corner, slower: _Corner) -> bool:
    """Whether a corner costs less than the mix of its neighbours that takes as long."""
    falls, falls_to_slower = between.cost - faster.cost, slower.cost - faster.cost
    return falls * (slower.op_s - faster.op_s) < falls_to_slower * (between.op_s - faster.op_s)
