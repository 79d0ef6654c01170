"""Where each section is cut, in which lane each part is, and what pieces that makes of the nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spindle_cli.costs.memory import inner_bytes
from spindle_cli.plan.pipelines.sections import Section
from spindle_cli.plan.problem import Problem

# A section's parts: of each the op behind its last, counted in the section, and its lane. Neighbours have
# different lanes.
Parts = tuple[tuple[int, int], ...]
# Of each section.
Assignment = tuple[Parts, ...]


@dataclass(frozen=True)
class Piece:
    """Ops [first, last) of a node in a lane.

    `takes`: the pieces whose outputs it takes, each with the bytes of the whole batch.
    """

    node: int
    first: int
    last: int
    lane: int
    takes: tuple[tuple[int, int], ...]


def with_part(parts: Parts, first: int, last: int, lane: int) -> Parts:
    """Parts with ops [first, last) in a lane, and the others where they were."""
    ends = [0, *(end for end, _ in parts)]
    cut = []
    for (start, end), (_, part_lane) in zip(pairwise(ends), parts, strict=True):
        cut += [(min(end, first), start, part_lane), (end, max(start, last), part_lane)]
    cut.append((last, first, lane))
    joined: list[tuple[int, int]] = []
    for end, start, part_lane in sorted(cut):
        if start >= end:
            continue
        if joined and joined[-1][1] == part_lane:
            joined.pop()
        joined.append((end, part_lane))
    return tuple(joined)


class Cutter:
    """Makes pieces of a problem's nodes."""

    def __init__(self, problem: Problem, sections: Sequence[Section]) -> None:
        self._problem = problem
        self._of_op = {
            (name, first + place): (number, place)
            for number, section in enumerate(sections)
            for name, first in section.users
            for place in range(section.num_ops)
        }
        self._spans = [list(self._spans_of(number)) for number in range(len(problem.nodes))]

    def _spans_of(self, number: int) -> Iterator[tuple[int, int, int, int]]:
        """The spans of a node's sections in order: (section, its op that comes first, how many, the node's
        op).
        """
        node = self._problem.nodes[number]
        begin = node.first_op
        while begin < node.first_op + node.num_ops:
            section, place = self._of_op[node.metaop.name, begin]
            end = begin + 1
            while end < node.first_op + node.num_ops and self._of_op[node.metaop.name, end] == (
                section,
                place + end - begin,
            ):
                end += 1
            yield section, place, end - begin, begin
            begin = end

    def pieces(self, assignment: Assignment) -> list[Piece]:
        """The nodes cut where their lane changes, producers first."""
        cut: list[Piece] = []
        last_of: dict[int, int] = {}  # by node, its last piece
        for number in self._problem.order:
            node = self._problem.nodes[number]
            metaop = node.metaop
            of_every_op = set(metaop.inputs_of_every_op)
            makers = [(self._problem.nodes[i], last_of[i]) for i in self._problem.producers[metaop.name]]
            outside = [(maker, index) for maker, index in makers if maker.metaop.name != metaop.name]
            for first, last, lane in self._runs(number, assignment):
                takes = []
                if first > 0:
                    before = last_of[number if first > node.first_op else number - 1]
                    takes.append((before, inner_bytes(metaop)))
                takes += [
                    (index, maker.metaop.output_bytes)
                    for maker, index in outside
                    if first == 0 or maker.metaop.name in of_every_op
                ]
                last_of[number] = len(cut)
                cut.append(Piece(number, first, last, lane, tuple(takes)))
        return cut

    def _runs(self, number: int, assignment: Assignment) -> list[tuple[int, int, int]]:
        """The runs of a node's ops in one lane: (first op, op behind the last, lane) of each."""
        runs: list[tuple[int, int, int]] = []
        for section, place, count, begin in self._spans[number]:
            start = place
            for end, lane in assignment[section]:
                stop = min(end, place + count)
                if stop <= start:
                    continue
                first, last = begin + start - place, begin + stop - place
                if runs and runs[-1][2] == lane:
                    first = runs.pop()[0]
                runs.append((first, last, lane))
                start = stop
        return runs
