"""What a MetaOp may run on while some devices are free, by the prices of these."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from spindle_cli.plan.bound.pricing import hull


class Choices:
    """The allocations of a node that some free devices have room for, by some prices.

    Attributes:
        fastest_first: the allocations, of equally fast ones the first first.
        op_s: what an op takes on each of these, ascending.
    """

    def __init__(self, fastest_first: Sequence[int], op_s: Sequence[float], cost: Sequence[float]) -> None:
        self.fastest_first = fastest_first
        self.op_s = [op_s[point] for point in fastest_first]
        self._cheapest: list[int] = []
        least = inf, -1
        for point in fastest_first:
            own = cost[point], point
            if own < least:
                self._cheapest.append(point)
                least = own
        self._cheapest_s = [op_s[point] for point in self._cheapest]
        corners = hull(self._cheapest_s, [cost[point] for point in self._cheapest])
        self._corners = [self._cheapest[place] for place in corners]
        self._corners_s = [op_s[point] for point in self._corners]

    def cheapest(self, seconds: float) -> int | None:
        """What is worth least of all on which an op takes so long or less, of equals the first of the
        node's; None if it takes longer on all.
        """
        count = bisect_right(self._cheapest_s, seconds)
        return self._cheapest[count - 1] if count else None

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
