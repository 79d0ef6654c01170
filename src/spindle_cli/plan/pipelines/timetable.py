"""Forward and backward passes of pieces in lanes: a lane runs one pass at a time, whatever comes first.

Of passes that could start together in a lane the most urgent goes first: by default that with the longest
chain of passes and messages behind it, so that what other lanes wait for is not held up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spindle_cli.plan.pipelines.cuts import Piece
from spindle_cli.plan.pipelines.lanes import Lanes


class PieceSeconds(NamedTuple):
    """Of both passes."""

    forward_s: float
    backward_s: float


class Timetable(NamedTuple):
    """`end_s`: when each lane is through. `order`: all passes by start: (piece, is_backward)."""

    end_s: list[float]
    order: list[tuple[int, bool]]


def seconds_of(lanes: Lanes, pieces: Sequence[Piece]) -> list[PieceSeconds] | None:
    """Of each piece; None where one has no allocation in its lane."""
    found = []
    for piece in pieces:
        allocation = lanes.of_node[piece.node][piece.lane]
        if allocation is None:
            return None
        count, point = piece.last - piece.first, allocation.point
        found.append(PieceSeconds(count * point.forward_s, count * point.backward_s))
    return found


def timetable(
    lanes: Lanes, pieces: Sequence[Piece], seconds: Sequence[PieceSeconds], urgency: Sequence[float]
) -> Timetable:
    """Run all passes, each as early as its lane and what it takes allow; messages between two lanes go one
    at a time each way.

    Args:
        urgency: of each node, what the length of the chains behind its passes is multiplied by.
    """
    return _Running(lanes, pieces, seconds, urgency).run()


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
        self.lane_of = [piece.lane for piece in pieces] * 2
        self.seconds = [each.forward_s for each in seconds] + [each.backward_s for each in seconds]
        self.num_lanes = lanes.count
        # Of each pass, those that wait for it, and how long what they take is on its way.
        self.next: list[list[tuple[int, float]]] = [[(count + p, 0.0)] for p in range(count)]
        self.next += [[] for _ in range(count)]
        self.missing = [0] * count + [1] * count
        for number, piece in enumerate(pieces):
            for source, num_bytes in piece.takes:
                there, here = pieces[source].lane, piece.lane
                forward_s = backward_s = 0.0
                if there != here:
                    forward_s = lanes.message_s(num_bytes, there, here)
                    backward_s = lanes.message_s(num_bytes, here, there)
                self.next[source].append((number, forward_s))
                self.next[count + number].append((count + source, backward_s))
                self.missing[number] += 1
                self.missing[count + source] += 1
        self.weight = [urgency[piece.node] for piece in pieces] * 2
        self.rest_s = self._rest_s()

    def _rest_s(self) -> list[float]:
        """The longest chain that begins with each pass."""
        rest_s = [0.0] * (2 * self.count)
        backward = range(self.count, 2 * self.count)
        for this in (*backward, *range(self.count - 1, -1, -1)):
            behind_s = 0.0
            for other, moved_s in self.next[this]:
                behind_s = max(behind_s, moved_s + rest_s[other])
            rest_s[this] = self.seconds[this] + behind_s
        return rest_s

    def run(self) -> Timetable:
        free_s = [0.0] * self.num_lanes
        sent_s: dict[tuple[int, int], float] = {}  # when the way between two lanes is free again
        ready_s = [0.0] * (2 * self.count)
        urgent = [-weight * rest_s for weight, rest_s in zip(self.weight, self.rest_s, strict=True)]
        ready = {number for number in range(self.count) if not self.missing[number]}
        lane_of, missing = self.lane_of, list(self.missing)
        order: list[tuple[int, bool]] = []
        while ready:
            start_s, _, this = min(
                (max(ready_s[number], free_s[lane_of[number]]), urgent[number], number) for number in ready
            )
            ready.remove(this)
            here = lane_of[this]
            end_s = free_s[here] = start_s + self.seconds[this]
            order.append((this % self.count, this >= self.count))
            for other, moved_s in self.next[this]:
                arrived_s = end_s
                if moved_s:
                    way = (here, lane_of[other])
                    arrived_s = sent_s[way] = max(end_s, sent_s.get(way, 0.0)) + moved_s
                if arrived_s > ready_s[other]:
                    ready_s[other] = arrived_s
                missing[other] -= 1
                if not missing[other]:
                    ready.add(other)
        return Timetable(free_s, order)
