"""Starting the jobs of a list as early as devices and inputs allow, in gaps as well: the serial schedule
generation of project scheduling (Kolisch, EJOR 1996), and its justification (Valls et al., EJOR 2005).

Devices are counted by type. The counts of an allocation are packed into one integer, a field for each type,
with a bit above each that is missing from a difference where a type has too few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.listing import Job, Timed

FIELD_BITS = 24
# Of so many jobs of a list a state is kept.
STRIDE = 5
# Starts and ends that are less apart are one, as a share of all MetaOps one after the other.
_HARDLY = 1e-12


@dataclass
class _State:
    """What jobs have taken so far.

    Attributes:
        times: ascending, from 0 on; behind the last one infinity.
        free: from each of these times on, until the next, the devices that are free, with the bits above.
        ends: of each node, when its last job ends.
    """

    times: list[float]
    free: list[int]
    ends: list[float]

    def copy(self) -> _State:
        return _State(self.times[:], self.free[:], self.ends[:])


class Trail(NamedTuple):
    """Jobs with their times, and the state before the first and every `STRIDE`th behind it."""

    timed: list[Timed]
    states: list[_State]


class Backfill:
    """Starts jobs of one problem."""

    def __init__(self, problem: Problem) -> None:
        nodes = problem.nodes
        self._op_s = [[point.op_s for point in node.points] for node in nodes]
        self._needed = [[_packed(point.of_types) for point in node.points] for node in nodes]
        self._hardly_s = _HARDLY * problem.serial_s
        self._inputs = [node.inputs for node in nodes]
        self._consumers = [node.consumers for node in nodes]
        room = problem.devices_of_types
        self._room = _packed(room)
        self._guards = _packed((1 << (FIELD_BITS - 1),) * len(room))
        self._behind_s = _longest_chains(problem)

    def timed(self, jobs: Sequence[Job], *, backwards: bool = False) -> tuple[list[Timed], float]:
        """The jobs with their times, in the order given, and when the last one ends.

        Args:
            jobs: producers before consumers, each node's ops complete; of these the first job first.
            backwards: on the graph with its edges turned round, consumers before producers.
        """
        state = self._empty()
        timed = self._go_on(state, jobs, inf, backwards=backwards)
        assert timed is not None, "no limit"
        return timed, max(state.ends)

    def trail(self, jobs: Sequence[Job], known: Trail | None = None, first: int = 0) -> Trail:
        """The jobs with their times, to be changed.

        Args:
            known: a trail whose jobs before `first` are the same.
        """
        kept = 0 if known is None else first // STRIDE
        timed = [] if known is None else known.timed[: kept * STRIDE]
        states = [] if known is None else known.states[:kept]
        state = self._empty() if known is None else known.states[kept].copy()
        for place in range(kept * STRIDE, len(jobs) + 1, STRIDE):
            states.append(state.copy())
            own = self._go_on(state, jobs[place : place + STRIDE], inf)
            assert own is not None, "no limit"
            timed += own
        return Trail(timed, states)

    def changed(
        self, trail: Trail, jobs: Sequence[Job], first: int, within_s: float
    ) -> tuple[list[Timed], float] | None:
        """Give jobs as `timed` does, if those before `first` are a trail's; None if the last one ends after
        `within_s`.
        """
        kept = first // STRIDE
        state = trail.states[kept].copy()
        timed = self._go_on(state, jobs[kept * STRIDE :], within_s)
        end_s = max(state.ends)  # perhaps of a job of the trail, which is not looked at again
        return None if timed is None or end_s > within_s else (trail.timed[: kept * STRIDE] + timed, end_s)

    def _empty(self) -> _State:
        return _State([0.0, inf], [self._room | self._guards], [0.0] * len(self._op_s))

    def _go_on(
        self, state: _State, jobs: Sequence[Job], within_s: float, *, backwards: bool = False
    ) -> list[Timed] | None:
        """Start some jobs more, in a state that is changed; None if the last one of these ends after
        `within_s`.

        Args:
            within_s: backwards none.
        """
        inputs, behind_s = self._consumers if backwards else self._inputs, self._behind_s
        guards, op_s, needed, hardly_s = self._guards, self._op_s, self._needed, self._hardly_s
        times, free, ends = state.times, state.free, state.ends
        timed: list[Timed] = []
        for job in jobs:
            node, point, num_ops = job
            taken = needed[node][point]
            start_s = ends[node]
            for producer in inputs[node]:
                if ends[producer] > start_s:
                    start_s = ends[producer]
            lasts_s = num_ops * op_s[node][point]
            latest_s = within_s - behind_s[node] - lasts_s
            if start_s > latest_s:
                return None
            first = bisect_right(times, start_s + hardly_s) - 1
            place, until_s = first, start_s + lasts_s - hardly_s
            while times[place] < until_s:
                if (free[place] - taken) & guards != guards:
                    first = place + 1
                    start_s = times[first]
                    until_s = start_s + lasts_s - hardly_s
                place += 1
            if start_s > latest_s:
                return None
            # A job starts at one of the times: at 0, or when another one ends.
            end_s = start_s + lasts_s
            last = bisect_right(times, end_s + hardly_s) - 1
            if times[last] < end_s - hardly_s:
                last += 1
                times.insert(last, end_s)
                free.insert(last, free[last - 1])
            for place in range(first, last):
                free[place] -= taken
            ends[node] = end_s
            timed.append((job, start_s, end_s))
        return timed

    def justified(self, timed: Sequence[Timed]) -> tuple[list[Timed], float]:
        """Push jobs towards the end, the last one first, and back towards the start: the schedule ends no
        later, and often earlier.
        """
        from_end, _ = self.timed(last_ended_first(timed), backwards=True)
        return self.timed(last_ended_first(from_end))


def last_ended_first(timed: Sequence[Timed]) -> list[Job]:
    """Jobs in the order in which a schedule is made from its end."""
    return [job for job, _, _ in sorted(timed, key=lambda item: -item[2])]


def first_started_first(timed: Sequence[Timed]) -> list[Job]:
    """Jobs in order of start."""
    return [job for job, _, _ in sorted(timed, key=lambda item: item[1])]


def _packed(counts: Sequence[int]) -> int:
    return sum(count << (FIELD_BITS * place) for place, count in enumerate(counts))


def _longest_chains(problem: Problem) -> list[float]:
    """For each node, the seconds of the longest chain behind it, each node on its fastest allocation."""
    chains_s = [0.0] * len(problem.nodes)
    for node in reversed(problem.order):
        for other in problem.nodes[node].consumers:
            chains_s[node] = max(chains_s[node], problem.nodes[other].shortest_s + chains_s[other])
    return chains_s
