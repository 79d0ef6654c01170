"""The pattern that is worth most, of the allocations of some nodes: a knapsack with a capacity for each type
of device, solved by dynamic programming over the devices that are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spindle_cli.plan.bound.patterns import Pattern

# Of a node, so many allocations are looked at: those that are worth most beyond what their devices are worth.
MOST_LOOKED_AT = 10
# Devices of a type are counted in so many groups at most, so that no more states are looked at.
MOST_GROUPS = (256, 64, 32)


class Worth(NamedTuple):
    """What a second of an allocation is worth.

    Attributes:
        point: of the node's.
        groups: of devices of each type that it takes.
        value: in seconds of the schedule; above 0.
    """

    point: int
    groups: tuple[int, ...]
    value: float


def groups_of(counts: Sequence[int], capacities: Sequence[int]) -> tuple[int, ...]:
    """Devices of each type in groups, rounded up, of which there are not too many."""
    most = MOST_GROUPS[min(len(capacities), len(MOST_GROUPS)) - 1]
    return tuple(
        -(-count // max(1, -(-capacity // most))) for count, capacity in zip(counts, capacities, strict=True)
    )


def best_pattern(
    nodes: Sequence[int], worth: Mapping[int, Sequence[Worth]], room: Sequence[int]
) -> tuple[float, Pattern]:
    """What a second of the best pattern of these nodes is worth, and the pattern.

    Args:
        worth: by node.
        room: groups of devices of each type.
    """
    shape = tuple(groups + 1 for groups in room)
    values = np.zeros(shape)  # by what is free, of the nodes so far
    chosen: list[np.ndarray[tuple[int, ...], np.dtype[np.int16]]] = []
    for node in nodes:
        with_node, choice = values.copy(), np.full(shape, -1, np.int16)
        for number, own in enumerate(worth[node]):
            each = zip(shape, own.groups, strict=True)
            before = values[tuple(slice(0, size - taken) for size, taken in each)]
            behind = tuple(slice(taken, None) for taken in own.groups)
            with_own = before + own.value
            is_better = with_own > with_node[behind]
            np.copyto(with_node[behind], with_own, where=is_better)
            choice[behind][is_better] = number
        values = with_node
        chosen.append(choice)
    free, pattern = tuple(room), Pattern()
    for node, choice in zip(reversed(nodes), reversed(chosen), strict=True):
        number = int(choice[free])
        if number >= 0:
            own = worth[node][number]
            pattern[node] = own.point
            free = tuple(left - taken for left, taken in zip(free, own.groups, strict=True))
    return float(values[tuple(room)]), pattern
