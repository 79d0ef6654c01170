"""A device's passes by the clock, what it posts ahead of each, and where there is room for sums."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spindle_cli.account.activations import Layout
from spindle_cli.account.types import ParameterGroup
from spindle_cli.program.clock import Compute, PassClock
from spindle_cli.program.transfers import Directory, TimedTransfer
from spindle_cli.program.types import Kind


class LanePass(NamedTuple):
    """A pass of a device by the clock. `slice_index`: of the slice that it runs backward; None: it is a
    forward pass.
    `has_room`: sums may start inside of it, as it waits for no other device between its start and its end.
    """

    start: int
    end: int
    slice_index: int | None
    has_room: bool


@dataclass(frozen=True)
class Lane:
    """A device's passes, in order, and the ascending times of what it posts beside sums."""

    passes: Sequence[LanePass]
    starts: Sequence[int]
    ends: Sequence[int]
    posts: Sequence[int]

    @classmethod
    def of(cls, passes: Sequence[LanePass], posts: Collection[int]) -> Lane:
        """`posts`: in any order."""
        return cls(passes, [pass_.start for pass_ in passes], [pass_.end for pass_ in passes], sorted(posts))

    def before(self, time: int) -> int:
        """How many passes come before a post that is no sum: all but those that end later."""
        return bisect_right(self.ends, time)

    def before_sum(self, time: int, slices: Collection[int]) -> int:
        """How many passes come before a sum to which slices add: one under way, too, that adds to it, or
        inside of which it may start, as nothing that is posted ahead of this pass comes behind the sum.
        """
        before, under_way = self.before(time), self._under_way(time)
        if under_way is None:
            return before
        adds = under_way.slice_index in slices
        may_be_inside = under_way.has_room and self._last_post(time, under_way) is None
        return before + 1 if adds or may_be_inside else before

    def no_earlier(self, time: int, slices: Collection[int]) -> int:
        """The first time, from `time` on, at which a sum to which slices add fits into what is posted."""
        under_way = self._under_way(time)
        if under_way is None or under_way.slice_index not in slices:
            return time
        if not under_way.has_room:
            return under_way.end + 1
        last = self._last_post(time, under_way)
        return time if last is None else last + 1

    def _under_way(self, time: int) -> LanePass | None:
        place = self.before(time)
        if place == len(self.passes) or self.starts[place] >= time:
            return None
        return self.passes[place]

    def _last_post(self, time: int, under_way: LanePass) -> int | None:
        """The last that is posted ahead of a pass and has a place at `time` or behind it."""
        place = bisect_left(self.posts, under_way.end) - 1
        return self.posts[place] if place >= 0 and self.posts[place] >= time else None


def lane_passes(
    device: int,
    computes: Iterable[Compute],
    clock: PassClock,
    layouts: Sequence[Layout],
    directory: Directory,
    groups: Iterable[ParameterGroup],
) -> list[LanePass]:
    """A device's passes. There is no room in forward passes, nor in those that sum over shares or that gather
    or sum what is shared out.
    """
    by_pass = {index for group in groups if group.sharding.is_by_pass for index in group.slices}

    def has_room(kind: Kind, index: int) -> bool:
        layout = layouts[index]
        return (
            kind is Kind.BACKWARD
            and index not in by_pass
            and directory.of_share(layout, layout.share_of[device]) is None
        )

    return [
        LanePass(*clock.when[kind, index], index if kind is Kind.BACKWARD else None, has_room(kind, index))
        for kind, index in computes
    ]


def other_posts(losses_at: int, transfers: Iterable[TimedTransfer], num_devices: int) -> list[set[int]]:
    """For each device, the times of what it posts between its passes beside sums: the losses, and
    messages.
    """
    posts = [{losses_at} for _ in range(num_devices)]
    for timed in transfers:
        posts[timed.transfer.source].add(timed.time)
        posts[timed.transfer.destination].add(timed.time)
    return posts
