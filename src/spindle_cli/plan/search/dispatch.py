"""Dispatching towards a common end: whenever devices come free, each ready MetaOp gets as many as it needs to
finish in time, and what is left goes to those that gain most.

How many it needs follows from the linear program: the seconds that a MetaOp and everything after it take
    there, against the seconds that are left until a target end. So what has fallen behind is given more, and
    all end together. There are no waves here and no levels: a MetaOp starts when its inputs have ended,
    whatever else still runs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.listing import Job


class Nudge(NamedTuple):
    """A change to one decision of a dispatch: the next job of a MetaOp that has had so many.

    Attributes:
        points: allocations further up (or down, if negative) its curve than it needs; None for what it needs.
        share: of its ops that are left, how many to run so; counts only with `points`.
        wait: let it pass once.
        urgency: multiplies its urgency.
    """

    points: int | None = None
    share: float = 1.0
    wait: bool = False
    urgency: float = 1.0


@dataclass(frozen=True)
class Guide:
    """What steers a dispatch.

    Attributes:
        slack: the target end is the lower bound times 1 + slack.
        stretch: for each node, multiplies its seconds in the linear program.
        urgency: for each node, multiplies its urgency.
        widen: give devices that would stay idle to what starts anyway.
        least_fit: start a MetaOp on fewer devices than it needs only if it gets this share of them.
        nudges: by (node, number of its jobs so far).
    """

    slack: float
    stretch: tuple[float, ...]
    urgency: tuple[float, ...]
    widen: bool = True
    least_fit: float = 0.0
    nudges: Mapping[tuple[int, int], Nudge] = field(default_factory=dict)

    def nudged(self, key: tuple[int, int], nudge: Nudge | None) -> Guide:
        """With one nudge set, or without it."""
        nudges = {k: v for k, v in self.nudges.items() if k != key}
        if nudge is not None:
            nudges[key] = nudge
        return replace(self, nudges=nudges)


# What a ready node asks for: (minus its urgency, node, index of the smallest point that will do, of the
# largest that it needs, share of its ops to run on the largest). Sorts by urgency, the most urgent first.
_Wish = tuple[float, int, int, int, float]

# Widening may cost this much in device-seconds per op: the devices would be idle otherwise.
WIDEN_COST = 1.5
ALMOST = 1 + 1e-9


class Dispatcher:
    """Dispatches one problem, forwards or (`backwards`) from its end to its start.

    A backwards dispatch runs on the graph with its edges turned round; its jobs come out in the order of time
    reversed, so that the ragged ends of the schedule lie at its start.
    """

    def __init__(self, problem: Problem, bound: Bound, *, backwards: bool = False) -> None:
        nodes = problem.nodes
        self.problem = problem
        self.backwards = backwards
        self.lower_bound_s = bound.lower_bound_s
        self._rates = problem.rates
        self._speeds = tuple(tuple(-op_s for _, op_s in rates) for rates in self._rates)  # ascending
        self._steps = tuple(_steps_up(rates) for rates in self._rates)
        self._num_ops = [node.num_ops for node in nodes]
        self._consumers = [node.inputs if backwards else node.consumers for node in nodes]
        self._num_inputs = [len(node.consumers if backwards else node.inputs) for node in nodes]
        self._last_first = problem.order if backwards else tuple(reversed(problem.order))
        self._op_s = [
            sum(point.op_s * ops for point, ops in allocation) / node.num_ops
            for node, allocation in zip(nodes, bound.ops, strict=True)
        ]

    def run(self, guide: Guide, give_up_s: float = inf) -> tuple[list[Job], float]:
        """The jobs in order of start, and when the last one ends; `inf` if that is after `give_up_s`."""
        state = _State(self._num_ops, self._num_inputs, self.problem.num_devices)
        op_s = [s * stretch for s, stretch in zip(self._op_s, guide.stretch, strict=True)]
        tail_s = self._tails(op_s)
        end_s = self.lower_bound_s * (1 + guide.slack)
        while state.ready or state.running:
            if state.ready and state.free:
                wishes = self._wishes(state, guide, op_s, tail_s, end_s)
                granted = self._grant(wishes, state.free, guide)
                self._start(state, granted)
            if not state.running:
                break
            if state.wait_for_next() > give_up_s:
                return state.jobs, inf
            self._release(state)
        return state.jobs, state.now_s

    def _tails(self, op_s: Sequence[float]) -> list[float]:
        """For each node, the seconds of the longest chain after it."""
        tail_s = [0.0] * len(op_s)
        for i in self._last_first:
            for j in self._consumers[i]:
                tail_s[i] = max(tail_s[i], tail_s[j] + op_s[j] * self._num_ops[j])
        return tail_s

    def _wishes(
        self, state: _State, guide: Guide, op_s: Sequence[float], tail_s: Sequence[float], end_s: float
    ) -> list[_Wish]:
        """What each ready node needs to end in time, the most urgent first."""
        left_s = max(end_s - state.now_s, 1e-9 * end_s)
        left, rates, nudges = state.left, self._rates, guide.nudges
        wishes: list[_Wish] = []
        for node in state.ready:
            points = rates[node]
            urgency = (left[node] * op_s[node] + tail_s[node]) / left_s
            wanted_s = op_s[node] / urgency * ALMOST
            most = min(bisect_left(self._speeds[node], -wanted_s), len(points) - 1)
            least, share = most, 1.0
            if most and urgency <= 1.0 and points[most][1] < wanted_s:
                # Between two allocations: so many ops on the larger that the mix takes `wanted_s` per op.
                least = most - 1
                share = (points[least][1] - wanted_s) / (points[least][1] - points[most][1])
            if nudges:
                nudge = nudges.get((node, state.num_jobs[node]))
                if nudge is not None:
                    if nudge.wait and state.lets_pass(node):
                        continue
                    urgency *= nudge.urgency
                    if nudge.points is not None:
                        least = most = min(max(most + nudge.points, 0), len(points) - 1)
                        share = nudge.share
            wishes.append((-urgency * guide.urgency[node], node, least, most, share))
        wishes.sort()
        return wishes

    def _grant(self, wishes: Sequence[_Wish], free: int, guide: Guide) -> list[tuple[_Wish, int]]:
        """Points for as many wishes as there are devices for: the least, then the most, then wider still."""
        granted: list[_Wish] = []
        points: list[int] = []
        for wish in wishes:
            rates = self._rates[wish[1]]
            index = wish[2]
            needed = rates[index][0]
            if needed > free:
                while index and rates[index][0] > free:
                    index -= 1
                if rates[index][0] > free or rates[index][0] < guide.least_fit * needed:
                    continue
                needed = rates[index][0]
            granted.append(wish)
            points.append(index)
            free -= needed
            if not free:
                break
        if free:
            free = self._raise_to_most(granted, points, free)
        if free and guide.widen:
            self._widen(granted, points, free)
        return list(zip(granted, points, strict=True))

    def _raise_to_most(self, granted: Sequence[_Wish], points: list[int], free: int) -> int:
        for place, (_, node, _, most, _) in enumerate(granted):
            rates = self._rates[node]
            index = points[place]
            while index < most and rates[index + 1][0] - rates[index][0] <= free:
                free -= rates[index + 1][0] - rates[index][0]
                index += 1
            points[place] = index
        return free

    def _widen(self, granted: Sequence[_Wish], points: list[int], free: int) -> None:
        """Give the devices left over, a step at a time, where they cost the fewest device-seconds per op."""
        steps = [self._steps[wish[1]] for wish in granted]
        following = [of_node[index] for of_node, index in zip(steps, points, strict=True)]
        while free:
            cheapest, best = WIDEN_COST, -1
            for place, (more, wider_s, devices, op_s, cost) in enumerate(following):
                if more <= free and wider_s < cheapest * devices * op_s:
                    cheapest, best = cost, place
            if best < 0:
                return
            free -= int(following[best][0])
            points[best] += 1
            following[best] = steps[best][points[best]]

    def _start(self, state: _State, granted: Sequence[tuple[_Wish, int]]) -> None:
        """Start what was granted, for as long as its allocation is the right one."""
        next_s = state.running[0][0] if state.running else None
        for (_, node, least, most, share), index in granted:
            needed, op_s = self._rates[node][index]
            left = state.left[node]
            if index == most:
                ops = ceil(share * left - 1e-9)
            elif index == least:
                ops = ceil((1 - share) * left - 1e-9)
            elif index > most or next_s is None:
                ops = left
            else:  # too few devices: only until some come free
                ops = round((next_s - state.now_s) / op_s) if op_s else left
            ops = 1 if ops < 1 else min(ops, left)
            state.jobs.append((node, index, ops))
            state.num_jobs[node] += 1
            state.left[node] = left - ops
            state.free -= needed
            state.ready.remove(node)
            heapq.heappush(state.running, (state.now_s + ops * op_s, node, needed))

    def _release(self, state: _State) -> None:
        """What ended now is ready again, or lets its consumers be."""
        for node in state.ended:
            if state.left[node]:
                state.ready.append(node)
                continue
            for consumer in self._consumers[node]:
                state.missing[consumer] -= 1
                if not state.missing[consumer]:
                    state.ready.append(consumer)


# From a point to the next: devices more, device-seconds of an op there, devices and seconds of it here, and
# how many times as many device-seconds that are; from the last point none.
_Step = tuple[float, float, int, float, float]
_NO_STEP: _Step = (inf, inf, 1, inf, inf)


def _steps_up(rates: Sequence[tuple[int, float]]) -> tuple[_Step, ...]:
    """From each of a node's points."""
    steps = [
        (wider - devices, wider * wider_s, devices, op_s, wider * wider_s / (devices * op_s))
        for (devices, op_s), (wider, wider_s) in pairwise(rates)
    ]
    return (*steps, _NO_STEP)


class _State:
    """A dispatch under way."""

    __slots__ = (
        "_waited",
        "ended",
        "free",
        "jobs",
        "left",
        "missing",
        "now_s",
        "num_jobs",
        "ready",
        "running",
    )

    def __init__(self, num_ops: Sequence[int], num_inputs: Sequence[int], num_devices: int) -> None:
        self.left = list(num_ops)  # ops not started
        self.missing = list(num_inputs)  # inputs that have not ended
        self.ready = [i for i, count in enumerate(num_inputs) if not count]
        self.running: list[tuple[float, int, int]] = []  # heap of (end, node, devices)
        self.free = num_devices
        self.now_s = 0.0
        self.jobs: list[Job] = []
        self.num_jobs = [0] * len(self.left)
        self.ended: list[int] = []
        self._waited: set[tuple[int, int]] = set()

    def lets_pass(self, node: int) -> bool:
        """Whether a node that is to wait once can do so now: it has not yet, and something will end."""
        key = (node, self.num_jobs[node])
        if not self.running or key in self._waited:
            return False
        self._waited.add(key)
        return True

    def wait_for_next(self) -> float:
        """Move to the next end, and free the devices of all that ends then."""
        running = self.running
        self.now_s, node, needed = heapq.heappop(running)
        self.free += needed
        self.ended = [node]
        at_once_s = self.now_s * (1 + 1e-12)
        while running and running[0][0] <= at_once_s:
            _, node, needed = heapq.heappop(running)
            self.free += needed
            self.ended.append(node)
        return self.now_s
