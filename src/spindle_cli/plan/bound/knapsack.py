"""The pattern that is worth most, of the allocations of some nodes: a knapsack with a capacity for each type
of device, solved by dynamic programming over the devices that are free.

A *pattern* says which nodes run side by side, each on which of its points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pattern = dict[int, int]  # node -> index of its point
# Of patterns whose worth differs by less, any is the best.
_HARDLY = 1e-12

_Values = npt.NDArray[np.float64]
_Choice = npt.NDArray[np.int32]


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


class _Part(NamedTuple):
    """What the best pattern has of one part: by what is free, which of its sets, and of each set the choices
    of its nodes.
    """

    chosen: _Choice
    sets: list[list[tuple[int, _Choice]]]


def best_pattern(
    nodes: Sequence[int], worth: Mapping[int, Sequence[Worth]], room: Sequence[int]
) -> tuple[float, Pattern]:
    """What a second of the best pattern of these nodes is worth, and the pattern.

    Args:
        worth: by node.
        room: groups of devices of each type.
    """
    return best_of_parts([[nodes]], worth, room)


def best_of_parts(
    parts: Sequence[Sequence[Sequence[int]]], worth: Mapping[int, Sequence[Worth]], room: Sequence[int]
) -> tuple[float, Pattern]:
    """The best pattern where nodes are in parts, from each of which a pattern has nodes of one set.

    Args:
        parts: of each, its sets.
        worth: by node.
        room: groups of devices of each type.
    """
    values = np.zeros(tuple(groups + 1 for groups in room))  # by what is free, of the parts so far
    done: list[_Part] = []
    for sets in parts:
        best, chosen, choices = values, np.full(values.shape, -1, np.int32), []
        for number, nodes in enumerate(sets):
            own, choice = _with_nodes(values, nodes, worth)
            is_better = own > best + _HARDLY
            best = np.where(is_better, own, best)
            chosen[is_better] = number
            choices.append(choice)
        values = best
        done.append(_Part(chosen, choices))
    free, pattern = tuple(room), Pattern()
    for part in reversed(done):
        if part.chosen[free] < 0:
            continue
        for node, choice in reversed(part.sets[part.chosen[free]]):
            if choice[free] >= 0:
                own_worth = worth[node][choice[free]]
                pattern[node] = own_worth.point
                free = tuple(left - taken for left, taken in zip(free, own_worth.groups, strict=True))
    return float(values[tuple(room)]), pattern


def _with_nodes(
    values: _Values, nodes: Sequence[int], worth: Mapping[int, Sequence[Worth]]
) -> tuple[_Values, list[tuple[int, _Choice]]]:
    """The best values with these nodes as well, and of each node its choice, by what is free."""
    shape = values.shape
    choices: list[tuple[int, _Choice]] = []
    for node in nodes:
        with_node, choice = values.copy(), np.full(shape, -1, np.int32)
        for number, own in enumerate(worth[node]):
            if any(taken >= size for taken, size in zip(own.groups, shape, strict=True)):
                continue
            each = zip(shape, own.groups, strict=True)
            with_own = values[tuple(slice(0, size - taken) for size, taken in each)] + own.value
            behind = tuple(slice(taken, None) for taken in own.groups)
            is_better = with_own > with_node[behind]
            np.copyto(with_node[behind], with_own, where=is_better)
            choice[behind][is_better] = number
        values = with_node
        choices.append((node, choice))
    return values, choices
