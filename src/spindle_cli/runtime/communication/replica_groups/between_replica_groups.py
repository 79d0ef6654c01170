"""What ranks of several replica groups hand each other of a flat tensor that each replica group shares out
for itself.

A rank keeps a range of it, as one of its replica group, and steps some parts of that range. Gradients go from
all that keep a part to the one that steps it, which adds them up; its new values go back to them. Either way
each rank sends to each other one what both have to do with, all at once. What goes to one rank alone and is
one part of the range goes from where it is, and new values that come so come to where they belong: between
two replica groups with the same ranges that is all there is, and nothing of it is copied
(`account/holdings.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from spindle_cli.runtime.backends.gather_turns import GatherTurns
from spindle_cli.runtime.communication.collectives import add_up
from spindle_cli.runtime.communication.replica_groups.group_ranges import GroupRange
from spindle_cli.runtime.communication.transfers import wait_for

if TYPE_CHECKING:
    from torch import Tensor

_Parts = list[tuple[int, int]]  # elements [first, last) of what a rank keeps


@dataclass(frozen=True)
class BetweenReplicaGroups:
    """One rank's part in it.

    Attributes:
        communicator: of all ranks of all replica groups; None is that of all ranks.
        kept: by rank, what this one keeps and that one steps.
        stepped: by rank, what this one steps and that one keeps.
    """

    communicator: dist.ProcessGroup | None
    kept: tuple[_Parts, ...]
    stepped: tuple[_Parts, ...]

    @classmethod
    def of(
        cls, ranges: Sequence[GroupRange], position: int, count: int, communicator: dist.ProcessGroup | None
    ) -> BetweenReplicaGroups:
        """`position`: of this rank among all, of which there are `count`."""
        kept_ranges = [group_range for group_range in ranges if position in group_range.keepers]
        begin = min((group_range.first for group_range in kept_ranges), default=0)
        kept: tuple[_Parts, ...] = tuple([] for _ in range(count))
        stepped: tuple[_Parts, ...] = tuple([] for _ in range(count))
        for group_range in kept_ranges:
            part = group_range.first - begin, group_range.last - begin
            if group_range.owner != position:
                kept[group_range.owner].append(part)
                continue
            for peer in group_range.keepers:
                if peer != position:
                    stepped[peer].append(part)
        return cls(communicator, kept, stepped)

    @property
    def sum_elements(self) -> int:
        """The elements for which a sum over replica groups takes buffers."""
        return _copied(self.kept) + sum(map(_length, self.stepped))

    @property
    def handed_on_elements(self) -> int:
        """The elements for which handing new values on takes buffers."""
        return _copied(self.kept) + _copied(self.stepped)

    def start_sum(self, values: Tensor) -> UnderWay:
        """Start adding to what this rank steps of its range what others have. Collective."""
        taken = values.new_empty(sum(map(_length, self.stepped)))
        return self._start(values, self.kept, self.stepped, taken, None)

    def start_handing_on(self, values: Tensor, turns: GatherTurns | None = None) -> UnderWay:
        """Start handing on what this rank steps of its range, and taking the rest. Collective."""
        place = _in_place(values, self.kept)
        taken = values.new_empty(sum(map(_length, self.kept))) if place is None else place
        return self._start(values, self.stepped, self.kept, taken, turns)

    def finish_sum(self, under_way: UnderWay, values: Tensor) -> None:
        """Wait for a sum, and add it to what this rank steps, in the order of the other ranks."""
        wait_for(under_way.work)
        received: dict[tuple[int, int], list[Tensor]] = {}
        for part, values_of_one in under_way.by_part(self.stepped):
            received.setdefault(part, []).append(values_of_one)
        for (first, last), contributions in received.items():
            target = values[first:last]
            if values.itemsize < 4 and len(contributions) > 1:  # rounded once
                add_up(torch.stack([target, *contributions]), target)
                continue
            for contribution in contributions:
                target.add_(contribution)

    def finish_handing_on(self, under_way: UnderWay, values: Tensor) -> None:
        """Wait until the range is whole again."""
        wait_for(under_way.work)
        if _in_place(values, self.kept) is None:
            for (first, last), new in under_way.by_part(self.kept):
                values[first:last].copy_(new)

    def _start(
        self,
        values: Tensor,
        sent: Sequence[_Parts],
        received: Sequence[_Parts],
        taken: Tensor,
        turns: GatherTurns | None,
    ) -> UnderWay:
        out = _in_place(values, sent)
        if out is None:
            out = torch.cat([values[first:last] for to_one in sent for first, last in to_one])
        # As bytes: libraries know few of the types of numbers.
        width = values.itemsize
        start = partial(
            dist.all_to_all_single,
            taken.view(torch.uint8),
            out.view(torch.uint8),
            [width * _length(from_one) for from_one in received],
            [width * _length(to_one) for to_one in sent],
            group=self.communicator,
            async_op=True,
        )
        work = start() if turns is None else turns.take(start)
        assert work is not None, "this rank is a member"
        return UnderWay(work, taken, out)


@dataclass(frozen=True)
class UnderWay:
    """An exchange: `work` is what the library knows of it, `received` what comes, `sent` what goes."""

    work: dist.Work
    received: Tensor
    sent: Tensor

    def by_part(self, parts: Sequence[_Parts]) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """What has come of each of some parts, in the order in which it was sent."""
        begin = 0
        for from_one in parts:
            for first, last in from_one:
                yield (first, last), self.received[begin : begin + last - first]
                begin += last - first


def _in_place(values: Tensor, parts: Sequence[_Parts]) -> Tensor | None:
    """Parts of a range that are one, as they lie there; None: they are several."""
    flat = [part for of_one in parts for part in of_one]
    if len(flat) > 1:
        return None
    return values[slice(*flat[0])] if flat else values[:0]


def _copied(parts: Sequence[_Parts]) -> int:
    """Elements of parts that do not go or come in place."""
    return sum(map(_length, parts)) if sum(map(len, parts)) > 1 else 0


def _length(parts: _Parts) -> int:
    return sum(last - first for first, last in parts)
