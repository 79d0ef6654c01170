"""Dispatching towards a common end: whenever devices come free, each ready MetaOp gets as many as it needs to
finish in time, and what is left goes to those that gain most.

How many it needs follows from the linear program: the seconds that a MetaOp and everything after it take
    there, against the seconds that are left until a target end. So what has fallen behind is given more, and
    all end together. There are no waves here and no levels: a MetaOp starts when its inputs have ended,
    whatever else still runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, chain, pairwise
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.compiled import compiled, compiled_and_kept
from spindle_cli.plan.problem import Problem

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Nudge(NamedTuple):
    """A change to one decision of a dispatch: the next job of a MetaOp that has had so many.

    Attributes:
        points: allocations further up (or down, if negative) its curve than it needs; infinite: as it needs.
        share: of its ops that are left, how many to run so; counts only with `points`.
        wait: let it pass once.
        urgency: multiplies its urgency.
    """

    points: float = inf
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


# Widening may cost this much in device-seconds per op: the devices would be idle otherwise.
WIDEN_COST = 1.5
ALMOST = 1 + 1e-9


class Nodes(NamedTuple):
    """A problem's graph in the direction of a dispatch, as arrays. N nodes, P points of all of them in turn.

    Attributes:
        num_ops, num_inputs: [N].
        last_first: [N] nodes, each behind all that follow it.
        consumer_from: [N + 1] where those that take a node's output begin in `consumers`.
        point_from: [N + 1] where a node's points begin, by devices.
        devices, op_s: [P] of a point.
        more, wider_s, cost: [P] from a point to the node's next: devices more, device-seconds of an op there,
            and how many times as many as here that are; infinite behind the last.
    """

    num_ops: Ints
    num_inputs: Ints
    last_first: Ints
    consumer_from: Ints
    consumers: Ints
    point_from: Ints
    devices: Ints
    op_s: Floats
    more: Floats
    wider_s: Floats
    cost: Floats


class Guided(NamedTuple):
    """A guide as arrays.

    Attributes:
        op_s, urgency: [N] seconds of an op in the linear program, stretched; what urgency is multiplied by.
        nudge_of: [N, J] which nudge a node's next job has that has had so many; -1: none.
        nudges: [K, 4] what each says, as `Nudge` has it.
    """

    op_s: Floats
    urgency: Floats
    nudge_of: Ints
    nudges: Floats


class State(NamedTuple):
    """A dispatch under way.

    Attributes:
        left, missing, num_jobs: [N] ops not started, inputs that have not ended, and jobs so far.
        is_ready: [N] whether a node may start.
        waited: [N] with how many jobs a node let others pass last.
        end_s, needed: [N] when a node's job ends, infinite where none runs; its devices.
        tail_s: [N] seconds of the longest chain behind a node.
        wish: [N] ready nodes, the most urgent first; `key`: [N] minus the urgency of each node.
        least, most, share: [N] of each node the smallest point that will do, the largest that it needs, and
            the share of its ops to run on that.
        granted, points: [N] nodes that are given devices, and on which points.
        jobs: [J, 3] node, point and ops of each.
    """

    left: Ints
    missing: Ints
    num_jobs: Ints
    is_ready: Ints
    waited: Ints
    end_s: Floats
    needed: Ints
    tail_s: Floats
    wish: Ints
    key: Floats
    least: Ints
    most: Ints
    share: Floats
    granted: Ints
    points: Ints
    jobs: Ints


class Dispatcher:
    """Dispatches one problem, forwards or (`backwards`) from its end to its start.

    A backwards dispatch runs on the graph with its edges turned round; its jobs come out in the order of time
    reversed, so that the ragged ends of the schedule lie at its start.
    """

    def __init__(self, problem: Problem, bound: Bound, *, backwards: bool = False) -> None:
        self.problem = problem
        self.backwards = backwards
        self.lower_bound_s = bound.lower_bound_s
        self._nodes = _nodes_of(problem, backwards=backwards)
        self._state = _state_for(self._nodes)
        most_jobs = int(self._nodes.num_ops.max(initial=0)) + 1
        self._nudge_of = np.full((len(problem.nodes), most_jobs), -1, np.int64)
        self._op_s = np.array(
            [
                sum(point.op_s * ops for point, ops in allocation) / node.num_ops
                for node, allocation in zip(problem.nodes, bound.ops, strict=True)
            ]
        )

    def run(self, guide: Guide, give_up_s: float = inf) -> tuple[Ints, float]:
        """The jobs in order of start ([J, 3]: node, point, ops), and when the last one ends; `inf` if that is
        after `give_up_s`.
        """
        nudges = np.fromiter(chain.from_iterable(guide.nudges.values()), np.float64).reshape(-1, 4)
        keys = np.fromiter(chain.from_iterable(guide.nudges), np.int64).reshape(-1, 2)
        nudged = keys[:, 0], keys[:, 1]
        self._nudge_of[nudged] = np.arange(len(nudges))
        op_s, urgency = self._op_s * np.array(guide.stretch), np.array(guide.urgency)
        num_jobs, end_s = _compiled_dispatch()(
            self._nodes,
            Guided(op_s, urgency, self._nudge_of, nudges),
            self._state,
            self.problem.num_devices,
            self.lower_bound_s * (1 + guide.slack),
            guide.widen,
            guide.least_fit,
            give_up_s,
        )
        self._nudge_of[nudged] = -1
        return self._state.jobs[:num_jobs].copy(), end_s


def _nodes_of(problem: Problem, *, backwards: bool) -> Nodes:
    nodes = problem.nodes
    consumers = [node.inputs if backwards else node.consumers for node in nodes]
    steps = [step for rates in problem.rates for step in _steps_up(rates)]
    ints = np.int64
    return Nodes(
        num_ops=np.array([node.num_ops for node in nodes], ints),
        num_inputs=np.array([len(node.consumers if backwards else node.inputs) for node in nodes], ints),
        last_first=np.array(problem.order if backwards else tuple(reversed(problem.order)), ints),
        consumer_from=np.array([0, *accumulate(map(len, consumers))], ints),
        consumers=np.array([node for some in consumers for node in some], ints),
        point_from=np.array([0, *accumulate(map(len, problem.rates))], ints),
        devices=np.array([devices for rates in problem.rates for devices, _ in rates], ints),
        op_s=np.array([op_s for rates in problem.rates for _, op_s in rates], np.float64),
        more=np.array([more for more, _, _ in steps]),
        wider_s=np.array([wider_s for _, wider_s, _ in steps]),
        cost=np.array([cost for _, _, cost in steps]),
    )


def _steps_up(rates: Sequence[tuple[int, float]]) -> list[tuple[float, float, float]]:
    """From each of a node's points to the next, as `Nodes` has it."""
    steps = [
        (float(wider - devices), wider * wider_s, wider * wider_s / (devices * op_s))
        for (devices, op_s), (wider, wider_s) in pairwise(rates)
    ]
    return [*steps, (inf, inf, inf)]


def _state_for(nodes: Nodes) -> State:
    """The places that dispatches of these nodes take."""
    count = len(nodes.num_ops)

    def ints() -> Ints:
        return np.zeros(count, np.int64)

    def floats() -> Floats:
        return np.zeros(count)

    return State(
        left=ints(),
        missing=ints(),
        num_jobs=ints(),
        is_ready=ints(),
        waited=ints(),
        end_s=floats(),
        needed=ints(),
        tail_s=floats(),
        wish=ints(),
        key=floats(),
        least=ints(),
        most=ints(),
        share=floats(),
        granted=ints(),
        points=ints(),
        jobs=np.zeros((int(nodes.num_ops.sum()), 3), np.int64),
    )


@cache
def _compiled_dispatch() -> Any:
    """The loop over a dispatch's events, compiled."""

    def dispatch(
        nodes: Nodes,
        guided: Guided,
        state: State,
        num_devices: int,
        target_s: float,
        widen: bool,
        least_fit: float,
        give_up_s: float,
    ) -> tuple[int, float]:
        """Dispatch until all ops have run: how many jobs, and when the last ends; infinite if that is after
        `give_up_s`.
        """
        _begin(nodes, guided, state)
        free, now_s, num_jobs = num_devices, 0.0, 0
        while True:
            if free:
                count = _wishes(nodes, guided, state, now_s, target_s)
                granted = _grant(nodes, state, count, free, widen, least_fit)
                next_s = inf
                for node in range(len(state.end_s)):
                    next_s = min(next_s, state.end_s[node])
                for place in range(granted):
                    free -= _start(nodes, state, place, now_s, next_s, num_jobs)
                    num_jobs += 1
            now_s_then = inf
            for node in range(len(state.end_s)):
                now_s_then = min(now_s_then, state.end_s[node])
            if now_s_then == inf:
                return num_jobs, now_s
            now_s = now_s_then
            free += _release(nodes, state, now_s)
            if now_s > give_up_s:
                return num_jobs, inf

    return compiled_and_kept(dispatch, [])


@compiled
def _begin(nodes: Nodes, guided: Guided, state: State) -> None:
    """Set what holds before the first job."""
    for node in range(len(nodes.num_ops)):
        state.left[node], state.missing[node] = nodes.num_ops[node], nodes.num_inputs[node]
        state.is_ready[node] = nodes.num_inputs[node] == 0
        state.num_jobs[node], state.waited[node] = 0, -1
        state.end_s[node], state.tail_s[node] = inf, 0.0
    for node in nodes.last_first:
        for at in range(nodes.consumer_from[node], nodes.consumer_from[node + 1]):
            behind = nodes.consumers[at]
            tail_s = state.tail_s[behind] + guided.op_s[behind] * nodes.num_ops[behind]
            state.tail_s[node] = max(state.tail_s[node], tail_s)


@compiled
def _wishes(nodes: Nodes, guided: Guided, state: State, now_s: float, target_s: float) -> int:
    """Set what each ready node needs to end in time, the most urgent first; how many there are."""
    left_s = max(target_s - now_s, 1e-9 * target_s)
    count = 0
    for node in range(len(state.left)):
        if not state.is_ready[node]:
            continue
        begin, num_points = nodes.point_from[node], nodes.point_from[node + 1] - nodes.point_from[node]
        urgency = (state.left[node] * guided.op_s[node] + state.tail_s[node]) / left_s
        wanted_s = guided.op_s[node] / urgency * ALMOST
        most = 0
        while most < num_points - 1 and nodes.op_s[begin + most] > wanted_s:
            most += 1
        least, share = most, 1.0
        if most and urgency <= 1.0 and nodes.op_s[begin + most] < wanted_s:
            # Between two allocations: so many ops on the larger that the mix takes `wanted_s` per op.
            least = most - 1
            narrower_s = nodes.op_s[begin + least]
            share = (narrower_s - wanted_s) / (narrower_s - nodes.op_s[begin + most])
        number = guided.nudge_of[node, state.num_jobs[node]]
        if number >= 0:
            if guided.nudges[number, 2] and _lets_pass(state, node):
                continue
            urgency *= guided.nudges[number, 3]
            if guided.nudges[number, 0] != inf:
                least = most = min(max(most + int(guided.nudges[number, 0]), 0), num_points - 1)
                share = guided.nudges[number, 1]
        state.least[node], state.most[node], state.share[node] = least, most, share
        state.key[node] = -urgency * guided.urgency[node]
        place = count
        while place and state.key[state.wish[place - 1]] > state.key[node]:
            state.wish[place] = state.wish[place - 1]
            place -= 1
        state.wish[place] = node
        count += 1
    return count


@compiled
def _lets_pass(state: State, node: int) -> bool:
    """Whether a node that is to wait once can do so now: it has not yet, and something will end."""
    if state.waited[node] == state.num_jobs[node]:
        return False
    for other in range(len(state.end_s)):
        if state.end_s[other] < inf:
            state.waited[node] = state.num_jobs[node]
            return True
    return False


@compiled
def _grant(
    nodes: Nodes,
    state: State,
    count: int,
    free: int,
    widen: bool,
    least_fit: float,
) -> int:
    """Set points for as many wishes as there are devices for: the least, then the most, then wider still; how
    many these are.
    """
    granted = 0
    for place in range(count):
        node = state.wish[place]
        begin, point = nodes.point_from[node], state.least[node]
        needed = nodes.devices[begin + point]
        if needed > free:
            while point and nodes.devices[begin + point] > free:
                point -= 1
            given = nodes.devices[begin + point]
            if given > free or given < least_fit * needed:
                continue
            needed = given
        state.granted[granted], state.points[granted] = node, point
        granted += 1
        free -= needed
        if not free:
            return granted
    for place in range(granted):
        node = state.granted[place]
        begin, point = nodes.point_from[node], state.points[place]
        while (
            point < state.most[node]
            and nodes.devices[begin + point + 1] - nodes.devices[begin + point] <= free
        ):
            free -= nodes.devices[begin + point + 1] - nodes.devices[begin + point]
            point += 1
        state.points[place] = point
    if widen:
        _widen(nodes, state, granted, free)
    return granted


@compiled
def _widen(nodes: Nodes, state: State, granted: int, free: int) -> None:
    """Give the devices left over, a step at a time, where they cost the fewest device-seconds per op."""
    while free:
        cheapest, best = WIDEN_COST, -1
        for place in range(granted):
            at = nodes.point_from[state.granted[place]] + state.points[place]
            if nodes.more[at] <= free and nodes.wider_s[at] < cheapest * nodes.devices[at] * nodes.op_s[at]:
                cheapest, best = nodes.cost[at], place
        if best < 0:
            return
        free -= int(nodes.more[nodes.point_from[state.granted[best]] + state.points[best]])
        state.points[best] += 1


@compiled
def _start(nodes: Nodes, state: State, place: int, now_s: float, next_s: float, num_jobs: int) -> int:
    """Start what was granted, for as long as its allocation is the right one; its devices.

    Args:
        next_s: when something ends that runs already; infinite: nothing does.
    """
    node, point = state.granted[place], state.points[place]
    at, left = nodes.point_from[node] + point, state.left[node]
    if point == state.most[node]:
        ops = ceil(state.share[node] * left - 1e-9)
    elif point == state.least[node]:
        ops = ceil((1 - state.share[node]) * left - 1e-9)
    elif point > state.most[node] or next_s == inf or nodes.op_s[at] == 0.0:
        ops = left
    else:  # too few devices: only until some come free
        ops = int(np.rint((next_s - now_s) / nodes.op_s[at]))
    ops = max(1, min(ops, left))
    state.jobs[num_jobs, 0], state.jobs[num_jobs, 1], state.jobs[num_jobs, 2] = node, point, ops
    state.num_jobs[node] += 1
    state.left[node] = left - ops
    state.is_ready[node] = 0
    state.end_s[node], state.needed[node] = now_s + ops * nodes.op_s[at], nodes.devices[at]
    return int(nodes.devices[at])


@compiled
def _release(nodes: Nodes, state: State, now_s: float) -> int:
    """Let what ended now be ready again, or its consumers; how many devices that frees."""
    freed = 0
    at_once_s = now_s * (1 + 1e-12)
    for node in range(len(state.end_s)):
        if state.end_s[node] > at_once_s:
            continue
        freed += state.needed[node]
        state.end_s[node] = inf
        if state.left[node]:
            state.is_ready[node] = 1
            continue
        for at in range(nodes.consumer_from[node], nodes.consumer_from[node + 1]):
            state.missing[nodes.consumers[at]] -= 1
            if not state.missing[nodes.consumers[at]]:
                state.is_ready[nodes.consumers[at]] = 1
    return int(freed)
