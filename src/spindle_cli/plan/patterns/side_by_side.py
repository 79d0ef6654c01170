"""Which MetaOps run side by side in the order of a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.listing import Timed

# Starts and ends are compared after so many decimals of the schedule's length.
DECIMALS = 9

Set = frozenset[int]  # nodes


def sets_in_order(problem: Problem, timed: Sequence[Timed]) -> list[Set]:
    """Sets of nodes that may run side by side if all starts and ends of MetaOps keep the order that a
    schedule has, one for each of the times between two of them: nodes that the schedule runs then, and such
    as could run earlier or later without waiting for others in another order.

    A pattern of nodes of one of these sets, then of the next, and so on, keeps producers before consumers.
    """
    nodes = problem.nodes
    end_s = max(end_s for _, _, end_s in timed)
    starts, ends = [1.0] * len(nodes), [0.0] * len(nodes)
    for (node, _, _), start_s, stop_s in timed:
        starts[node] = min(starts[node], round(start_s / end_s, DECIMALS))
        ends[node] = max(ends[node], round(stop_s / end_s, DECIMALS))
    place = {time: number for number, time in enumerate(sorted({*starts, *ends}))}
    first, last = [place[time] for time in starts], [place[time] for time in ends]
    _grow(problem, first, last, len(place) - 1)
    return [
        frozenset(node for node in range(len(nodes)) if first[node] <= number < last[node])
        for number in range(len(place) - 1)
    ]


def _grow(problem: Problem, first: list[int], last: list[int], most: int) -> None:
    """Let nodes start earlier and end later by one time after the other, each while none that it waits for,
    or that waits for it, is in the way.
    """
    grown = True
    while grown:
        grown = False
        for node in problem.nodes:
            own = node.index
            earliest = max((last[other] for other in node.inputs), default=0)
            latest = min((first[other] for other in node.consumers), default=most)
            start, end = max(earliest, first[own] - 1), min(latest, last[own] + 1)
            grown = grown or (start, end) != (first[own], last[own])
            first[own], last[own] = start, end
