"""Searching for pipelines: which section is in which lane, where sections are cut, and which passes go first.

From several beginnings, random changes of one of these at a time; one that makes the iteration a little
longer is kept in the beginning, in the end none (threshold accepting, Dueck and Scheuer 1990). What counts is

    the end of the last lane, with what it has to do beside its passes

by `timetable.py`, for passes in the order that it finds. Deterministic: the random numbers
come from a fixed seed, and the effort is counted in passes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf
from operator import add
from random import Random

from spindle_cli.account.compute import byte_s, costs_nothing
from spindle_cli.plan.pipelines.cuts import Assignment, Cutter, Parts, Piece, with_part
from spindle_cli.plan.pipelines.lanes import Lanes
from spindle_cli.plan.pipelines.sections import Section
from spindle_cli.plan.pipelines.timetable import Timetable, seconds_of, timetable

# By how much longer than the best a change may leave the iteration at first.
FIRST_THRESHOLD = 0.04
# A search goes on beyond each part of its effort only where the best so far takes at most this multiple of
# what is to be beaten.
STILL_IN_SIGHT = ((0.25, 1.25), (0.5, 1.1), (0.75, 1.03))
# A change counts as so many passes at least: where there are few pieces there is little to choose.
LEAST_COUNTED = 24
# By how many ops a cut is moved.
MOVES_OF_CUTS = (-4, -2, -1, 1, 2, 4)
URGENCIES = (0.1, 0.5, 0.8, 1.0, 1.25, 2.0, 10.0)
# By what part of itself a share of the work may be off.
ROUNDING = 1e-9


@dataclass(frozen=True)
class State:
    """A choice. `urgency`: of each node (timetable.py)."""

    assignment: Assignment
    urgency: tuple[float, ...]


@dataclass(frozen=True)
class Pipeline:
    """What a choice leads to."""

    state: State
    pieces: Sequence[Piece]
    timetable: Timetable
    end_s: float


class Search:
    """A problem in some lanes."""

    def __init__(self, lanes: Lanes, sections: Sequence[Section], seed: int = 0) -> None:
        self._lanes = lanes
        self._sections = sections
        self._cutter = Cutter(lanes.problem, sections)
        self._random = Random(seed)  # noqa: S311 - reproducible, not secret
        self._beside = Beside(lanes, sections)

    def best(self, effort: int, faster_than_s: float = inf) -> list[Pipeline]:
        """The best from each beginning that takes less than `faster_than_s`, the best first.

        Args:
            effort: passes to run in all; fewer where what is to be beaten is out of sight.
        """
        row = range(self._lanes.count)
        beginnings = [self._balanced(), self._in_a_row(row)]
        if self._lanes.problem.cluster.is_mixed:  # which type comes first may matter
            beginnings.append(self._in_a_row(row[::-1]))
        best = []
        for beginning in dict.fromkeys(beginnings):
            state = State(beginning, (1.0,) * len(self._lanes.problem.nodes))
            begun = self._run(state)
            if begun is not None:
                best.append(self._improved(begun, effort // len(beginnings), faster_than_s))
        best = [pipeline for pipeline in best if pipeline.end_s < faster_than_s]
        return sorted(best, key=lambda pipeline: pipeline.end_s)

    def _improved(self, begun: Pipeline, effort: int, faster_than_s: float) -> Pipeline:
        best = now = begun
        left = effort
        milestones = [(effort * (1 - part), most * faster_than_s) for part, most in STILL_IN_SIGHT]
        while left > 0:
            while milestones and left <= milestones[0][0]:
                if best.end_s > milestones.pop(0)[1]:
                    return best
            left -= max(2 * len(now.pieces), LEAST_COUNTED)
            changed = self._changed(now.state)
            tried = None if changed == now.state else self._run(changed)
            threshold = FIRST_THRESHOLD * max(0.0, left / effort)
            if tried is None or tried.end_s > best.end_s * (1 + threshold):
                continue
            if tried.end_s <= now.end_s * (1 + threshold):
                now = tried
            if now.end_s < best.end_s:
                best = now
        return best

    def _run(self, state: State) -> Pipeline | None:
        pieces = self._cutter.pieces(state.assignment)
        seconds = seconds_of(self._lanes, pieces)
        if seconds is None:
            return None
        table = timetable(self._lanes, pieces, seconds, state.urgency)
        beside_s = self._beside.seconds(state.assignment, pieces)
        end_s = max(map(add, table.end_s, beside_s))
        return Pipeline(state, pieces, table, end_s)

    def _changed(self, state: State) -> State:
        """A random neighbour; the same state where the change is none."""
        random = self._random
        kind = random.random()
        if kind < 0.2:
            urgency = list(state.urgency)
            urgency[random.randrange(len(urgency))] = random.choice(URGENCIES)
            return State(state.assignment, tuple(urgency))
        assignment = list(state.assignment)
        number = random.randrange(len(assignment))
        if kind < 0.35:
            second = random.randrange(len(assignment))
            one, two = assignment[number], assignment[second]
            if len(one) == len(two) == 1:
                assignment[number] = ((one[-1][0], two[-1][1]),)
                assignment[second] = ((two[-1][0], one[-1][1]),)
        else:
            assignment[number] = self._other_parts(assignment[number], self._sections[number].num_ops)
        return State(tuple(assignment), state.urgency)

    def _other_parts(self, parts: Parts, num_ops: int) -> Parts:
        """A section whole in a lane; from a new cut on, or up to it; or with a cut moved."""
        random = self._random
        lane = random.randrange(self._lanes.count)
        kind = random.random()
        if num_ops == 1 or kind < 0.3:
            return ((num_ops, lane),)
        if len(parts) > 1 and kind < 0.7:
            place = random.randrange(len(parts) - 1)
            end = parts[place][0]
            to = min(max(end + random.choice(MOVES_OF_CUTS), 0), num_ops)
            first, last = min(end, to), max(end, to)
            return with_part(parts, first, last, parts[place if to > end else place + 1][1])
        cut = random.randrange(1, num_ops)
        return with_part(parts, *((0, cut) if random.random() < 0.5 else (cut, num_ops)), lane)

    def _work_s(self, number: int, op_s: Callable[[int], float]) -> float:
        """Seconds of a section's ops of all its users; `op_s`: of an op of a node."""
        section = self._sections[number]
        total_s = 0.0
        for name, first in section.users:
            for node in self._lanes.problem.nodes:
                if node.metaop.name == name:
                    last = min(first + section.num_ops, node.first_op + node.num_ops)
                    count = last - max(first, node.first_op)
                    total_s += count * op_s(node.index) if count > 0 else 0.0
        return total_s

    def _least_work_s(self) -> list[float]:
        """Seconds of each section where each op is fastest."""
        return [self._work_s(number, self._lanes.least_op_s) for number in range(len(self._sections))]

    def _balanced(self) -> Assignment:
        """Sections whole, the longest first to the lane that is through with it first."""
        lanes = range(self._lanes.count)
        load_s = [0.0 for _ in lanes]
        parts: list[Parts] = [()] * len(self._sections)
        work_s = self._least_work_s()
        for number in sorted(range(len(parts)), key=lambda number: -work_s[number]):
            lane_s = [self._work_s(number, partial(self._lanes.op_s, lane=lane)) for lane in lanes]
            lane = min(lanes, key=lambda lane: (load_s[lane] + lane_s[lane], load_s[lane]))
            load_s[lane] += lane_s[lane]
            parts[number] = ((self._sections[number].num_ops, lane),)
        return tuple(parts)

    def _in_a_row(self, lanes: Sequence[int]) -> Assignment:
        """Sections in order, cut so that lanes in this order get as much to do, by their speed."""
        work_s = self._least_work_s()
        unit_s = sum(work_s) / sum(self._lanes.speed)
        ends = list(accumulate(self._lanes.speed[lane] for lane in lanes))

        def lane_at(before_s: float) -> int:
            share = before_s / unit_s * (1 + ROUNDING)  # what ends where a lane does begins the next one
            return lanes[min(bisect_right(ends, share), len(lanes) - 1)]

        before_s = 0.0
        assignment: list[Parts] = []
        for section, section_s in zip(self._sections, work_s, strict=True):
            parts: Parts = ((section.num_ops, lane_at(before_s)),)
            for op in range(1, section.num_ops):
                lane = lane_at(before_s + section_s * op / section.num_ops)
                parts = with_part(parts, op, section.num_ops, lane)
            assignment.append(parts)
            before_s += section_s
        return tuple(assignment)


class Beside:
    """What each lane does beside its passes, for one problem and its lanes."""

    def __init__(self, lanes: Lanes, sections: Sequence[Section]) -> None:
        self._lanes = lanes
        self._widths = [len(devices) for devices in lanes.devices]
        self._node_of = [lanes.problem.cluster.node_of[devices[0]] for devices in lanes.devices]
        profile = lanes.problem.profile
        self._costs = profile.processor
        self._is_free = costs_nothing(profile.processor)
        shares = self._widths if profile.optimizer_state_sharded else [1] * lanes.count
        self._update_s = [
            [num_bytes * profile.optimizer_s_per_byte / share for share in shares]
            for num_bytes in (sum(section.num_bytes) / section.num_ops for section in sections)
        ]

    def seconds(self, assignment: Assignment, pieces: Sequence[Piece]) -> list[float]:
        """Seconds that each lane takes for updates and, on CPUs, for messages and samples."""
        seconds = [0.0] * self._lanes.count
        for parts, update_s in zip(assignment, self._update_s, strict=True):
            first = 0
            for last, lane in parts:
                seconds[lane] += update_s[lane] * (last - first)
                first = last
        if not self._is_free:
            self._add_processor(seconds, pieces)
        return seconds

    def _add_processor(self, seconds: list[float], pieces: Sequence[Piece]) -> None:
        """Each device of a lane runs its slices, sends, receives and reads its share; what it takes comes
        back as a gradient.
        """
        costs = self._costs
        for lane in {slice_.lane for slice_ in pieces}:
            seconds[lane] += costs.step_s
        read: dict[tuple[int, str], float] = {}
        for slice_ in pieces:
            here = slice_.lane
            seconds[here] += costs.pass_s
            for source, num_bytes in slice_.takes:
                there = pieces[source].lane
                a_byte_s = byte_s(costs, float(self._node_of[here] != self._node_of[there]))
                for lane in (here, there) if there != here else ():
                    seconds[lane] += 2 * (costs.message_s + num_bytes / self._widths[lane] * a_byte_s)
            metaop = self._lanes.problem.nodes[slice_.node].metaop
            if any(slice_.first <= op < slice_.last for op in metaop.field_bytes):
                samples = metaop.batch_size / self._widths[here]
                read[here, metaop.task] = samples * costs.load_s.get(metaop.task, 0.0)
        for (lane, _), read_s in read.items():
            seconds[lane] += read_s
