"""Forward and backward passes of pieces in lanes: a lane runs one pass at a time, whatever comes first.

Of passes that could start together in a lane the most urgent goes first: by default that with the longest
chain of passes and messages behind it, so that what other lanes wait for is not held up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from spindle_cli.plan.pipelines.cuts import Piece
from spindle_cli.plan.pipelines.lanes import Lanes


class PieceSeconds(NamedTuple):
    """Seconds of both passes of a slice."""

    forward_s: float
    backward_s: float


class Timetable(NamedTuple):
    """`end_s`: when each lane is through. `order`: all passes by start: (piece, is_backward)."""

    end_s: list[float]
    order: list[tuple[int, bool]]


def seconds_of(lanes: Lanes, pieces: Sequence[Piece]) -> list[PieceSeconds] | None:
    """Seconds of each slice; None where one has no allocation in its lane."""
    seconds = []
    for slice_ in pieces:
        allocation = lanes.of_node[slice_.node][slice_.lane]
        if allocation is None:
            return None
        count, point = slice_.last - slice_.first, allocation.point
        seconds.append(PieceSeconds(count * point.forward_s, count * point.backward_s))
    return seconds


def timetable(
    lanes: Lanes,
    pieces: Sequence[Piece],
    seconds: Sequence[PieceSeconds],
    urgency: Sequence[float],
    most_open: int | None = None,
) -> Timetable:
    """Run all passes, each as early as its lane and what it takes allow; messages between two lanes go one
    at a time each way.

    Args:
        urgency: of each node, what the length of the chains behind its passes is multiplied by.
        most_open: how many parts of the MetaGraph, most often micro-batches, may at most have begun and not
            ended, so that no lane has the activations of more; backward passes then go first. Of a chain of
            equal stages, one open part for each ends when 1F1B (PipeDream, SOSP 2019) does, and keeps as much
            in the first stage. None: any number.
    """
    return _Running(lanes, pieces, seconds, urgency).run(most_open)


def messages_s(lanes: Lanes, pieces: Sequence[Piece]) -> float:
    """Seconds of the lane that takes most for what it sends and receives, one after another: activations, and
    their gradients back.
    """
    busy_s = [0.0] * lanes.count
    for slice_ in pieces:
        for source, num_bytes in slice_.takes:
            there, here = pieces[source].lane, slice_.lane
            if there != here:
                both_s = lanes.message_s(num_bytes, there, here) + lanes.message_s(num_bytes, here, there)
                busy_s[there] += both_s
                busy_s[here] += both_s
    return max(busy_s)


class _Running:
    """Pass number `p` is the forward pass of piece `p`, `len(pieces) + p` its backward pass."""

    def __init__(
        self,
        lanes: Lanes,
        pieces: Sequence[Piece],
        seconds: Sequence[PieceSeconds],
        urgency: Sequence[float],
    ) -> None:
        count = len(pieces)
        self.count = count
        self.lane_of = [slice_.lane for slice_ in pieces] * 2
        self.seconds = [slice_s.forward_s for slice_s in seconds] + [
            slice_s.backward_s for slice_s in seconds
        ]
        self.num_lanes = lanes.count
        # Of each pass, those that wait for it, and how long what they take is on its way.
        self.next: list[list[tuple[int, float]]] = [[(count + p, 0.0)] for p in range(count)]
        self.next += [[] for _ in range(count)]
        self.missing = [0] * count + [1] * count
        for number, slice_ in enumerate(pieces):
            for source, num_bytes in slice_.takes:
                there, here = pieces[source].lane, slice_.lane
                forward_s = backward_s = 0.0
                if there != here:
                    forward_s = lanes.message_s(num_bytes, there, here)
                    backward_s = lanes.message_s(num_bytes, here, there)
                self.next[source].append((number, forward_s))
                self.next[count + number].append((count + source, backward_s))
                self.missing[number] += 1
                self.missing[count + source] += 1
        self.weight = [urgency[slice_.node] for slice_ in pieces] * 2
        self.rest_s = self._rest_s()
        part_of, nodes = lanes.problem.part_of, lanes.problem.nodes
        self.part_of = [part_of[nodes[slice_.node].metaop.name] for slice_ in pieces] * 2

    def _rest_s(self) -> list[float]:
        """The longest chain that begins with each pass."""
        rest_s = [0.0] * (2 * self.count)
        backward = range(self.count, 2 * self.count)
        for this in (*backward, *range(self.count - 1, -1, -1)):
            behind_s = 0.0
            for behind, moved_s in self.next[this]:
                behind_s = max(behind_s, moved_s + rest_s[behind])
            rest_s[this] = self.seconds[this] + behind_s
        return rest_s

    def run(self, most_open: int | None) -> Timetable:
        free_s = [0.0] * self.num_lanes
        sent_s: dict[tuple[int, int], float] = {}  # when the way between two lanes is free again
        ready_s = [0.0] * (2 * self.count)
        first = self._ranks(backward_first=most_open is not None)
        ready = {number for number in range(self.count) if not self.missing[number]}
        lane_of, missing = self.lane_of, list(self.missing)
        open_parts = _OpenParts(self.part_of, most_open)
        order: list[tuple[int, bool]] = []
        while ready:
            start_s, this = inf, -1
            for number in ready:
                earliest_s = ready_s[number]
                if free_s[lane_of[number]] > earliest_s:
                    earliest_s = free_s[lane_of[number]]
                if most_open is not None:
                    earliest_s = max(earliest_s, open_parts.not_before_s(number))
                if earliest_s < start_s or (earliest_s == start_s < inf and first[number] < first[this]):
                    start_s, this = earliest_s, number
            ready.remove(this)
            here = lane_of[this]
            end_s = free_s[here] = start_s + self.seconds[this]
            open_parts.ran(this, end_s)
            order.append((this % self.count, this >= self.count))
            for behind, moved_s in self.next[this]:
                arrived_s = end_s
                if moved_s:
                    way = (here, lane_of[behind])
                    arrived_s = sent_s[way] = max(end_s, sent_s.get(way, 0.0)) + moved_s
                if arrived_s > ready_s[behind]:
                    ready_s[behind] = arrived_s
                missing[behind] -= 1
                if not missing[behind]:
                    ready.add(behind)
        return Timetable(free_s, order)

    def _ranks(self, *, backward_first: bool) -> list[int]:
        """The place of each pass among all that could start together; the least goes first."""
        urgency = [
            (backward_first and number < self.count, -weight * rest_s)
            for number, (weight, rest_s) in enumerate(zip(self.weight, self.rest_s, strict=True))
        ]
        ranks = [0] * len(urgency)
        for rank, number in enumerate(sorted(range(len(urgency)), key=urgency.__getitem__)):
            ranks[number] = rank
        return ranks


class _OpenParts:
    """Parts of the MetaGraph that have begun and not ended.

    A part that begins takes a place; one that ends gives its own back, from when its last pass is through.
    """

    def __init__(self, part_of: Sequence[int], most: int | None) -> None:
        self._part_of = part_of
        self._left = Counter(part_of)
        self._begun: set[int] = set()
        self._free_s = [0.0] * (len(self._left) if most is None else most)  # when each place is free

    def not_before_s(self, number: int) -> float:
        """When a pass may start, as far as places go; infinite: not before another part has ended."""
        if self._part_of[number] in self._begun:
            return 0.0
        return min(self._free_s, default=inf)

    def ran(self, number: int, end_s: float) -> None:
        """A pass of a part has been given its time."""
        part = self._part_of[number]
        if part not in self._begun:
            self._begun.add(part)
            self._free_s.remove(min(self._free_s))
        self._left[part] -= 1
        if not self._left[part]:
            self._free_s.append(end_s)
