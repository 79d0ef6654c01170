"""Which elements of a flat tensor ranks have that several teams share out, each team for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from spindle_cli.account.types import ParameterGroup
from spindle_cli.runtime.update.owned_ranges import FlatLayout, alignment


class TeamRange(NamedTuple):
    """Elements [first, last) that one rank of each team keeps.

    `keepers`: these ranks, by team, as positions among all ranks of the group, ascending. `owner`: the one of
    them that steps the elements.
    """

    first: int
    last: int
    keepers: tuple[int, ...]
    owner: int


@dataclass(frozen=True)
class Teams:
    """The teams of a group. `members`: of each team, the positions of its ranks among all; `weights`: theirs;
    none: their ranges are equal.
    """

    members: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, group: ParameterGroup) -> Teams:
        """Gives the teams of a group of devices that has several."""
        place = {device: position for position, device in enumerate(group.devices)}
        return cls(
            tuple(tuple(place[device] for device in team) for team in group.teams),
            tuple(group.in_team(team[0]).weights for team in group.teams),
        )

    def ranges(self, sizes: Mapping[str, int], itemsize: int) -> tuple[TeamRange, ...]:
        """What is cut by no team, of parameters with these numbers of elements, ascending: what the same
        ranks keep is stepped in equal parts by one of each team, to a multiple of the alignment.
        """
        layouts = [
            FlatLayout.of(sizes, itemsize, len(team), weights)
            for team, weights in zip(self.members, self.weights, strict=True)
        ]
        end = max(last for _, last in layouts[0].spans.values())
        cuts = {end} | {
            layout.range_of(place)[0]
            for layout, team in zip(layouts, self.members, strict=True)
            for place in range(len(team))
        }
        ranges: list[TeamRange] = []
        for first, last in pairwise(sorted(cut for cut in cuts if cut <= end)):
            keepers = tuple(
                team[_place_of(first, layout)] for team, layout in zip(self.members, layouts, strict=True)
            )
            ranges += self._divided(first, last, keepers, alignment(itemsize))
        return tuple(ranges)

    def _divided(self, first: int, last: int, keepers: Sequence[int], step: int) -> Iterator[TeamRange]:
        steps, count = -(-(last - first) // step), len(keepers)
        cuts = [min(last, first + steps * part // count * step) for part in range(count)] + [last]
        for owner, (begin, end) in zip(keepers, pairwise(cuts), strict=True):
            if begin < end:
                yield TeamRange(begin, end, tuple(keepers), owner)


def _place_of(element: int, layout: FlatLayout) -> int:
    """Whose range an element of a flat tensor is in."""
    return next(
        place
        for place in range(layout.count)
        if layout.range_of(place)[0] <= element < layout.range_of(place)[1]
    )
