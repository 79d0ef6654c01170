"""Dispatching towards a common end: whenever devices come free, each ready MetaOp gets as many as it needs to
finish in time, and what is left goes to those that gain most.

How many it needs follows from the linear program: the seconds that a MetaOp and everything after it take
    there, against the seconds that are left until a target end. So what has fallen behind is given more, and
    all end together. There are no waves here and no levels: a MetaOp starts when its inputs have ended,
    whatever else still runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import NamedTuple

from spindle_cli.plan.bound import Bound
from spindle_cli.plan.listing import Job
from spindle_cli.plan.problem import Problem


class Nudge(NamedTuple):
    """A change to one decision of a dispatch: the next job of a MetaOp that has had so many.

    Attributes:
        points: allocations further up (or down, if negative) its curve than it needs.
        share: of its ops that are left, how many to run so.
        wait: let it pass once.
        urgency: multiplies its urgency.
    """

    points: int = 0
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


class _Wish(NamedTuple):
    """What a ready node asks for; sorts by urgency, the most urgent first."""

    minus_urgency: float
    node: int
    least: int  # index of the smallest point that will do
    most: int  # index of the largest that it needs
    share: float  # of the ops left, how many on `most`


# Widening may cost this much in device-seconds per op: the devices would be idle otherwise.
WIDEN_COST = 1.5
_ALMOST = 1 + 1e-9


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
        wishes: list[_Wish] = []
        for node in state.ready:
            points = self._rates[node]
            urgency = (state.left[node] * op_s[node] + tail_s[node]) / left_s
            wanted_s = op_s[node] / urgency
            most = len(points) - 1
            for index, (_, point_s) in enumerate(points):
                if point_s <= wanted_s * _ALMOST:
                    most = index
                    break
            least, share = most, 1.0
            if most > 0 and urgency <= 1.0 and points[most][1] * _ALMOST < wanted_s:
                # Between two allocations: so many ops on the larger that the mix takes `wanted_s` per op.
                least = most - 1
                share = (points[least][1] - wanted_s) / (points[least][1] - points[most][1])
            key = (node, state.num_jobs[node])
            if key in guide.nudges:
                nudge = guide.nudges[key]
                if nudge.wait and state.running and key not in state.waited:
                    state.waited.add(key)
                    continue
                urgency *= nudge.urgency
                if nudge.points:
                    least = most = min(max(most + nudge.points, 0), len(points) - 1)
                    share = nudge.share
            wishes.append(_Wish(-urgency * guide.urgency[node], node, least, most, share))
        wishes.sort()
        return wishes

    def _grant(self, wishes: Sequence[_Wish], free: int, guide: Guide) -> list[tuple[_Wish, int]]:
        """Points for as many wishes as there are devices for: the least, then the most, then wider still."""
        granted: list[_Wish] = []
        points: list[int] = []
        for wish in wishes:
            rates = self._rates[wish.node]
            index = wish.least
            needed = rates[index][0]
            while index > 0 and rates[index][0] > free:
                index -= 1
            if rates[index][0] > free or rates[index][0] < guide.least_fit * needed:
                continue
            granted.append(wish)
            points.append(index)
            free -= rates[index][0]
            if not free:
                break
        if free:
            free = self._raise_to_most(granted, points, free)
        if free and guide.widen:
            self._widen(granted, points, free)
        return list(zip(granted, points, strict=True))

    def _raise_to_most(self, granted: Sequence[_Wish], points: list[int], free: int) -> int:
        for place, wish in enumerate(granted):
            rates = self._rates[wish.node]
            index = points[place]
            while index < wish.most and rates[index + 1][0] - rates[index][0] <= free:
                free -= rates[index + 1][0] - rates[index][0]
                index += 1
            points[place] = index
        return free

    def _widen(self, granted: Sequence[_Wish], points: list[int], free: int) -> None:
        """Give the devices left over, a step at a time, where they cost the fewest device-seconds per op."""
        while free:
            cheapest, best = WIDEN_COST, -1
            for place, wish in enumerate(granted):
                rates = self._rates[wish.node]
                index = points[place]
                if index + 1 < len(rates) and rates[index + 1][0] - rates[index][0] <= free:
                    (n, op_s), (wider, wider_s) = rates[index], rates[index + 1]
                    if wider * wider_s < cheapest * n * op_s:
                        cheapest, best = wider * wider_s / (n * op_s), place
            if best < 0:
                return
            rates = self._rates[granted[best].node]
            free -= rates[points[best] + 1][0] - rates[points[best]][0]
            points[best] += 1

    def _start(self, state: _State, granted: Sequence[tuple[_Wish, int]]) -> None:
        """Start what was granted, for as long as its allocation is the right one."""
        next_s = state.running[0][0] if state.running else None
        for wish, index in granted:
            needed, op_s = self._rates[wish.node][index]
            left = state.left[wish.node]
            if index == wish.most:
                ops = ceil(wish.share * left - 1e-9)
            elif index == wish.least:
                ops = ceil((1 - wish.share) * left - 1e-9)
            elif index > wish.most or next_s is None:
                ops = left
            else:  # too few devices: only until some come free
                ops = round((next_s - state.now_s) / op_s) if op_s else left
            state.start(Job(wish.node, index, min(max(ops, 1), left)), needed, op_s)
        started = {wish.node for wish, _ in granted}
        state.ready = [node for node in state.ready if node not in started]

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


class _State:
    """A dispatch under way."""

    __slots__ = (
        "ended",
        "free",
        "jobs",
        "left",
        "missing",
        "now_s",
        "num_jobs",
        "ready",
        "running",
        "waited",
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
        self.waited: set[tuple[int, int]] = set()
        self.ended: list[int] = []

    def start(self, job: Job, needed: int, op_s: float) -> None:
        """Run a job from now on."""
        self.jobs.append(job)
        self.num_jobs[job.node] += 1
        self.left[job.node] -= job.num_ops
        self.free -= needed
        heapq.heappush(self.running, (self.now_s + job.num_ops * op_s, job.node, needed))

    def wait_for_next(self) -> float:
        """Move to the next end, and free the devices of all that ends then."""
        self.now_s, node, needed = heapq.heappop(self.running)
        self.free += needed
        self.ended = [node]
        while self.running and self.running[0][0] <= self.now_s * (1 + 1e-12):
            _, node, needed = heapq.heappop(self.running)
            self.free += needed
            self.ended.append(node)
        return self.now_s
