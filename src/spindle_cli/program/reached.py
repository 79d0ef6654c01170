"""To which slices gradients come: backward passes of the others compute nothing."""

from __future__ import annotations

from collections.abc import Iterable

from spindle_cli.account.types import Edge, ParameterGroup


def reached_slices(
    num_slices: int, groups: Iterable[ParameterGroup], edges: Iterable[Edge]
) -> tuple[bool, ...]:
    """Say for each slice whether it, or one whose output it takes in, at whatever distance, trains
    anything.
    """
    reached = [False] * num_slices
    for group in groups:
        for index in group.slices if group.is_trained else ():
            reached[index] = True
    # Slices are in the order in which they start, so that what is taken in comes from earlier ones.
    for edge in sorted(edges, key=lambda edge: edge.consumer):
        reached[edge.consumer] |= reached[edge.producer]
    return tuple(reached)
