"""Which elements of a flat tensor each rank has that several replica groups shard, each for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from spindle_cli.account.types import ParameterGroup
from spindle_cli.runtime.update.owned_ranges import FlatLayout, alignment


class GroupRange(NamedTuple):
    """Elements [first, last) that one rank of each replica group keeps.

    `keepers`: these ranks, by replica group, as positions among all ranks of the group, ascending. `owner`:
    the one of them that steps the elements.
    """

    first: int
    last: int
    keepers: tuple[int, ...]
    owner: int


@dataclass(frozen=True)
class ReplicaGroups:
    """The replica groups of a group. `members`: of each replica group, the positions of its ranks among all;
    `weights`: theirs; none: their ranges are equal.
    """

    members: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, group: ParameterGroup) -> ReplicaGroups:
        """Gives the replica groups of a group of devices that has several."""
        place = {device: position for position, device in enumerate(group.devices)}
        return cls(
            tuple(tuple(place[device] for device in replica_group) for replica_group in group.replica_groups),
            tuple(group.in_replica_group(replica_group[0]).weights for replica_group in group.replica_groups),
        )

    def ranges(self, sizes: Mapping[str, int], itemsize: int) -> tuple[GroupRange, ...]:
        """What is cut by no replica group, of parameters with these numbers of elements, ascending: what the
        same ranks keep is stepped in equal parts by one of each replica group, to a multiple of the
        alignment.
        """
        layouts = [
            FlatLayout.of(sizes, itemsize, len(replica_group), weights)
            for replica_group, weights in zip(self.members, self.weights, strict=True)
        ]
        end = max(last for _, last in layouts[0].spans.values())
        cuts = {end} | {
            layout.range_of(place)[0]
            for layout, replica_group in zip(layouts, self.members, strict=True)
            for place in range(len(replica_group))
        }
        ranges: list[GroupRange] = []
        for first, last in pairwise(sorted(cut for cut in cuts if cut <= end)):
            keepers = tuple(
                replica_group[_place_of(first, layout)]
                for replica_group, layout in zip(self.members, layouts, strict=True)
            )
            ranges += self._divided(first, last, keepers, alignment(itemsize))
        return tuple(ranges)

    def _divided(self, first: int, last: int, keepers: Sequence[int], step: int) -> Iterator[GroupRange]:
        steps, count = -(-(last - first) // step), len(keepers)
        cuts = [min(last, first + steps * part // count * step) for part in range(count)] + [last]
        for owner, (begin, end) in zip(keepers, pairwise(cuts), strict=True):
            if begin < end:
                yield GroupRange(begin, end, tuple(keepers), owner)


def _place_of(element: int, layout: FlatLayout) -> int:
    """Whose range an element of a flat tensor is in."""
    return next(
        place
        for place in range(layout.count)
        if layout.range_of(place)[0] <= element < layout.range_of(place)[1]
    )
