"""Dispatching over devices of several types towards a common end, in compiled loops.

As `search/dispatch.py` does it over one type: whenever devices come free, each ready MetaOp is given what it
needs so that it and everything after it ends in time, the most urgent first. Which allocations these are, of
all that the free devices of each type have room for, the linear program's prices say: those whose devices'
time is worth least, most often some ops on one and the others on a slower one that is worth less. So a MetaOp
takes the type that it loses least on, or several at once where one is taken or too slow.

Prices alone leave open which of two MetaOps that lose alike takes which type. So a guide may say to take what
the program itself runs ops on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.mixed.bound import MixedBound
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.dispatch import ALMOST, WIDEN_COST, Floats, Ints

# Of the mean price of a device, what one of a type costs at least, of which there are enough.
LEAST_PRICE = 0.02
# An allocation of the program's optimum is taken where it takes this many times as long as wanted, or less.
OPTIMUM_LATE = 1.1
# With fewer ops left to run on it, an allocation of the optimum is taken for itself no longer.
FEWEST_LEFT = 0.5


class MixedGuide(NamedTuple):
    """What steers a dispatch. N nodes, T types, J jobs of a node at most.

    Attributes:
        numbers: [5] slack: the target end is the lower bound times 1 + slack; patience: a MetaOp that finds
            no room for an allocation that is fast enough takes one that takes up to so many times as long,
            and else waits; mixes, 0 or 1: a MetaOp may run some ops on one allocation and the others on a
            slower one, else it takes one that is fast enough; follows, 0 or 1: a MetaOp that is in time takes
            an allocation on which the linear program's optimum runs ops, as long as some of these are left,
            rather than what is worth least; widen, 0 or 1: give devices that would stay idle to what starts
            anyway.
        stretch, urgency: [N] what its seconds in the linear program, and its urgency, are multiplied by.
        prices: [T] what a type's price is multiplied by.
        shares: [N, J] of the ops that are left to a node with so many jobs, how many its next one runs; below
            0: as many as it needs.
    """

    numbers: Floats
    stretch: Floats
    urgency: Floats
    prices: Floats
    shares: Floats


SLACK, PATIENCE, MIXES, FOLLOWS, WIDEN = range(5)


class MixedNodes(NamedTuple):
    """A problem's graph in the direction of a dispatch, as arrays. N nodes, T types, P allocations of all
    nodes in turn, the fastest of each node first, of equals as the problem has them.

    Attributes:
        num_ops, num_inputs: [N].
        last_first: [N] nodes, each behind all that follow it.
        consumer_from: [N + 1] where those that take a node's output begin in `consumers`.
        point_from: [N + 1] where a node's allocations begin.
        number: [P] which of the problem's points of the node an allocation is; taken: [P, T] its devices of
            each type; op_s: [P].
        optimum: [P] how many ops the linear program runs there.
        bound_op_s: [N] seconds of an op in the linear program; last_s: [N] on the node's last point.
        prices: [T] of a second of a device; devices: [T] how many there are.
    """

    num_ops: Ints
    num_inputs: Ints
    last_first: Ints
    consumer_from: Ints
    consumers: Ints
    point_from: Ints
    number: Ints
    taken: Ints
    op_s: Floats
    optimum: Floats
    bound_op_s: Floats
    last_s: Floats
    prices: Floats
    devices: Ints


class MixedState(NamedTuple):
    """A dispatch under way.

    Attributes:
        left, missing, num_jobs: [N] ops not started, inputs that have not ended, and jobs so far.
        is_ready: [N] whether a node may start.
        end_s, running: [N] when a node's job ends, infinite where none runs; its allocation.
        op_s, tail_s: [N] seconds of an op in the linear program, stretched, and of the longest chain behind.
        wish: [N] ready nodes, the most urgent first; `key`, `wanted_s`: [N] minus a node's urgency, and the
            seconds of an op with which it ends in time.
        granted: [N] nodes that are given devices; `points`, `share`, `is_enough`: [N] on which allocation,
            which part of the ops that are left, and whether it is fast enough, not just until devices come
            free.
        unused: [P] ops of the linear program's optimum that have not run there yet.
        cost: [P] what an op is worth there.
        corners: [P] allocations of which a node mixes two.
        free: [T] devices.
        jobs: [J, 3] node, point and ops of each; `times`: [J, 2] when it starts and ends.
    """

    left: Ints
    missing: Ints
    num_jobs: Ints
    is_ready: Ints
    end_s: Floats
    running: Ints
    op_s: Floats
    tail_s: Floats
    wish: Ints
    key: Floats
    wanted_s: Floats
    granted: Ints
    points: Ints
    share: Floats
    is_enough: Ints
    unused: Floats
    cost: Floats
    corners: Ints
    free: Ints
    jobs: Ints
    times: Floats


def nodes_of(
    problem: Problem, bound: MixedBound, optimum: Sequence[dict[int, float]], *, backwards: bool
) -> MixedNodes:
    """A problem's graph, or that with its edges turned round.

    Args:
        optimum: of each node, by point, how many of its ops the linear program runs there.
    """
    nodes = problem.nodes
    inputs = [node.consumers if backwards else node.inputs for node in nodes]
    consumers = [node.inputs if backwards else node.consumers for node in nodes]
    in_order = [
        sorted(range(len(node.points)), key=lambda number, points=node.points: points[number].op_s)  # type: ignore[misc]
        for node in nodes
    ]
    points = [node.points[number] for node, own in zip(nodes, in_order, strict=True) for number in own]
    ints = np.int64
    return MixedNodes(
        num_ops=np.array([node.num_ops for node in nodes], ints),
        num_inputs=np.array(list(map(len, inputs)), ints),
        last_first=np.array(problem.order if backwards else tuple(reversed(problem.order)), ints),
        consumer_from=np.array([0, *accumulate(map(len, consumers))], ints),
        consumers=np.array([node for some in consumers for node in some], ints),
        point_from=np.array([0, *accumulate(map(len, in_order))], ints),
        number=np.array([number for own in in_order for number in own], ints),
        taken=np.array([point.counts for point in points], ints),
        op_s=np.array([point.op_s for point in points]),
        optimum=np.array(
            [used.get(number, 0.0) for own, used in zip(in_order, optimum, strict=True) for number in own]
        ),
        bound_op_s=np.array(bound.op_s, np.float64),
        last_s=np.array([node.points[-1].op_s for node in nodes]),
        prices=prices_of(bound),
        devices=np.array([problem.cluster.num_of_type[kind] for kind in problem.cluster.types], ints),
    )


def prices_of(bound: MixedBound) -> Floats:
    """What a second of a device of each type is worth, above 0."""
    mean = float(np.mean(bound.prices)) or 1.0
    return np.maximum(np.array(bound.prices, np.float64), LEAST_PRICE * mean)


def guide_for(
    nodes: MixedNodes, slack: float, patience: float, *, mixes: bool, follows_optimum: bool
) -> MixedGuide:
    """A guide that changes nothing about single nodes, types or jobs."""
    count = len(nodes.num_ops)
    return MixedGuide(
        numbers=np.array([slack, patience, float(mixes), float(follows_optimum), 1.0]),
        stretch=np.ones(count),
        urgency=np.ones(count),
        prices=np.ones(len(nodes.devices)),
        shares=np.full((count, int(nodes.num_ops.max(initial=0)) + 1), -1.0),
    )


def state_for(nodes: MixedNodes) -> MixedState:
    """The places that dispatches of these nodes take."""
    count, num_points, num_jobs = len(nodes.num_ops), len(nodes.op_s), int(nodes.num_ops.sum())

    def ints() -> Ints:
        return np.zeros(count, np.int64)

    def floats() -> Floats:
        return np.zeros(count)

    return MixedState(
        left=ints(),
        missing=ints(),
        num_jobs=ints(),
        is_ready=ints(),
        end_s=floats(),
        running=ints(),
        op_s=floats(),
        tail_s=floats(),
        wish=ints(),
        key=floats(),
        wanted_s=floats(),
        granted=ints(),
        points=ints(),
        share=floats(),
        is_enough=ints(),
        unused=np.zeros(num_points),
        cost=np.zeros(num_points),
        corners=np.zeros(num_points, np.int64),
        free=np.zeros(len(nodes.devices), np.int64),
        jobs=np.zeros((num_jobs, 3), np.int64),
        times=np.zeros((num_jobs, 2)),
    )


@compiled
def dispatch(
    nodes: MixedNodes, guide: MixedGuide, state: MixedState, bound_s: float, give_up_s: float
) -> tuple[int, float]:
    """Dispatch until all ops have run: how many jobs, and when the last ends; infinite if that is after
    `give_up_s`.

    Args:
        bound_s: the lower bound of all schedules.
    """
    _begin(nodes, guide, state)
    target_s = bound_s * (1 + guide.numbers[SLACK])
    now_s, num_jobs = 0.0, 0
    while True:
        next_s = _next_end_s(state)
        if _is_any_free(state):
            count = _wishes(guide, state, now_s, target_s)
            granted = _grant(nodes, guide, state, count, next_s < inf)
            for place in range(granted if guide.numbers[WIDEN] else 0):
                if _is_any_free(state):
                    _widen(nodes, state, place)
            for place in range(granted):
                _start(nodes, guide, state, place, now_s, next_s, num_jobs)
                num_jobs += 1
            next_s = _next_end_s(state)
        if next_s == inf:
            return num_jobs, now_s
        now_s = next_s
        _release(nodes, state, now_s)
        if now_s > give_up_s:
            return num_jobs, inf


@compiled
def _begin(nodes: MixedNodes, guide: MixedGuide, state: MixedState) -> None:
    """Set what holds before the first job."""
    for node in range(len(nodes.num_ops)):
        state.op_s[node] = nodes.bound_op_s[node] * guide.stretch[node]
        state.left[node], state.missing[node] = nodes.num_ops[node], nodes.num_inputs[node]
        state.is_ready[node] = nodes.num_inputs[node] == 0
        state.num_jobs[node], state.end_s[node], state.tail_s[node] = 0, inf, 0.0
    for node in nodes.last_first:
        for at in range(nodes.consumer_from[node], nodes.consumer_from[node + 1]):
            behind = nodes.consumers[at]
            tail_s = state.tail_s[behind] + state.op_s[behind] * nodes.num_ops[behind]
            state.tail_s[node] = max(state.tail_s[node], tail_s)
    for of_type in range(len(nodes.devices)):
        state.free[of_type] = nodes.devices[of_type]
    for at in range(len(nodes.op_s)):
        state.unused[at] = nodes.optimum[at]
        worth = 0.0
        for of_type in range(len(nodes.devices)):
            worth += nodes.taken[at, of_type] * nodes.prices[of_type] * guide.prices[of_type]
        state.cost[at] = worth * nodes.op_s[at]


@compiled
def _is_any_free(state: MixedState) -> bool:
    free = 0
    for of_type in range(len(state.free)):
        free += state.free[of_type]
    return free > 0


@compiled
def _has_room(nodes: MixedNodes, state: MixedState, at: int) -> bool:
    """Whether the free devices of each type are enough for an allocation."""
    has_room = True
    for of_type in range(len(state.free)):
        has_room = has_room and nodes.taken[at, of_type] <= state.free[of_type]
    return has_room


@compiled
def _take(nodes: MixedNodes, state: MixedState, at: int, sign: int) -> None:
    """Take an allocation's devices (1), or give them back (-1)."""
    for of_type in range(len(state.free)):
        state.free[of_type] -= sign * nodes.taken[at, of_type]


@compiled
def _next_end_s(state: MixedState) -> float:
    """When the next job ends; infinite where none runs."""
    next_s = inf
    for node in range(len(state.end_s)):
        next_s = min(next_s, state.end_s[node])
    return float(next_s)


@compiled
def _wishes(guide: MixedGuide, state: MixedState, now_s: float, target_s: float) -> int:
    """Set in which time each ready node needs an op to end in time, the most urgent first; how many there
    are.
    """
    left_s = max(target_s - now_s, 1e-9 * target_s)
    count = 0
    for node in range(len(state.left)):
        if not state.is_ready[node]:
            continue
        urgency = (state.left[node] * state.op_s[node] + state.tail_s[node]) / left_s
        state.wanted_s[node] = state.op_s[node] / urgency * ALMOST
        state.key[node] = -urgency * guide.urgency[node]
        place = count
        while place and state.key[state.wish[place - 1]] > state.key[node]:
            state.wish[place] = state.wish[place - 1]
            place -= 1
        state.wish[place] = node
        count += 1
    return count


@compiled
def _grant(nodes: MixedNodes, guide: MixedGuide, state: MixedState, count: int, is_running: bool) -> int:
    """Give as many wishes as there is room for what they run on; how many these are.

    Args:
        is_running: whether devices will come free.
    """
    granted = 0
    for number in range(count):
        node = state.wish[number]
        at = _as_in_optimum(nodes, state, node) if guide.numbers[FOLLOWS] else -1
        if at >= 0:
            state.share[granted], state.is_enough[granted] = state.unused[at] / state.left[node], 1
        else:
            at = _choose(nodes, guide, state, granted, node, is_running or granted > 0)
        if at < 0:
            continue
        state.granted[granted], state.points[granted] = node, at
        granted += 1
        _take(nodes, state, at, 1)
        if not _is_any_free(state):
            break
    return granted


@compiled
def _as_in_optimum(nodes: MixedNodes, state: MixedState, node: int) -> int:
    """What the linear program runs most of a node's ops on that are left, if that is fast enough and there is
    room; -1: there is none.
    """
    found, latest_s = -1, OPTIMUM_LATE * state.wanted_s[node]
    for at in range(nodes.point_from[node], nodes.point_from[node + 1]):
        if nodes.op_s[at] > latest_s:
            break
        if not state.unused[at] or not _has_room(nodes, state, at):
            continue
        if found >= 0 and (-state.unused[at], nodes.number[at]) > (-state.unused[found], nodes.number[found]):
            continue
        found = at
    return found


@compiled
def _choose(
    nodes: MixedNodes, guide: MixedGuide, state: MixedState, place: int, node: int, waits: bool
) -> int:
    """What to run a node on by prices; -1: it waits. It sets the grant's share, and whether it is enough."""
    wanted_s, fastest = state.wanted_s[node], nodes.point_from[node]
    while fastest < nodes.point_from[node + 1] and not _has_room(nodes, state, fastest):
        fastest += 1
    if fastest == nodes.point_from[node + 1]:
        return -1
    state.share[place], state.is_enough[place] = 1.0, 1
    if nodes.op_s[fastest] <= wanted_s:
        if guide.numbers[MIXES]:
            return _mixed(nodes, state, place, node, wanted_s)
        return _cheapest(nodes, state, node, wanted_s)
    op_s, last_s = nodes.op_s[fastest], nodes.last_s[node]
    # What is late takes the fastest there is, even where no allocation at all would be in time.
    if waits and op_s > guide.numbers[PATIENCE] * max(wanted_s, last_s):
        return -1
    state.is_enough[place] = op_s <= last_s * ALMOST
    return int(fastest)


@compiled
def _is_cheaper(nodes: MixedNodes, state: MixedState, at: int, other: int) -> bool:
    """Whether an allocation is worth less than another one of its node, or as much and comes first."""
    if other < 0 or state.cost[at] != state.cost[other]:
        return bool(other < 0 or state.cost[at] < state.cost[other])
    return bool(nodes.number[at] < nodes.number[other])


@compiled
def _cheapest(nodes: MixedNodes, state: MixedState, node: int, seconds: float) -> int:
    """What is worth least of all on which an op takes so long or less, of equals the node's first."""
    found = -1
    for at in range(nodes.point_from[node], nodes.point_from[node + 1]):
        if nodes.op_s[at] > seconds:
            break
        if _has_room(nodes, state, at) and _is_cheaper(nodes, state, at, found):
            found = at
    return found


@compiled
def _mixed(nodes: MixedNodes, state: MixedState, place: int, node: int, seconds: float) -> int:
    """What is worth least of all whose ops take so long on average, or less: some ops on one allocation, and
    the others on a slower one that is worth less. The faster one; it sets the grant's share of the ops.
    """
    corners, count, cheapest = state.corners, 0, -1
    # Of allocations in the plane of seconds and cost, the corners of the lower convex hull: mixes of any
    # others cost at least as much.
    for at in range(nodes.point_from[node], nodes.point_from[node + 1]):
        if not _has_room(nodes, state, at) or not _is_cheaper(nodes, state, at, cheapest):
            continue
        cheapest = at
        if count and state.cost[at] == state.cost[corners[count - 1]]:
            continue
        while count > 1 and not _is_corner(nodes, state, corners[count - 2], corners[count - 1], at):
            count -= 1
        corners[count] = at
        count += 1
    in_time = 1
    while in_time < count and nodes.op_s[corners[in_time]] <= seconds:
        in_time += 1
    if in_time < count:
        faster_s, slower_s = nodes.op_s[corners[in_time - 1]], nodes.op_s[corners[in_time]]
        state.share[place] = (slower_s - seconds) / (slower_s - faster_s)
    return int(corners[in_time - 1])


@compiled
def _is_corner(nodes: MixedNodes, state: MixedState, before: int, at: int, behind: int) -> bool:
    """Whether an allocation costs less than the mix of two others that takes as long."""
    own, own_s = state.cost[at] - state.cost[before], nodes.op_s[at] - nodes.op_s[before]
    all_s = nodes.op_s[behind] - nodes.op_s[before]
    return bool(own * all_s < (state.cost[behind] - state.cost[before]) * own_s)


@compiled
def _widen(nodes: MixedNodes, state: MixedState, place: int) -> None:
    """Give a grant devices that would stay idle, where they cost little."""
    node, before = state.granted[place], state.points[place]
    _take(nodes, state, before, -1)
    found = before
    for at in range(nodes.point_from[node], nodes.point_from[node + 1]):
        if nodes.op_s[at] >= nodes.op_s[before]:
            break
        if _has_room(nodes, state, at) and state.cost[at] <= WIDEN_COST * state.cost[before]:
            found = at
            state.share[place], state.is_enough[place] = 1.0, 1
            break
    _take(nodes, state, found, 1)
    state.points[place] = found


@compiled
def _start(
    nodes: MixedNodes,
    guide: MixedGuide,
    state: MixedState,
    place: int,
    now_s: float,
    next_s: float,
    num_jobs: int,
) -> None:
    """Start what was granted: the share of the node's ops that are left, or as many as end by `next_s`, when
    something ends that runs already (infinite: nothing does).
    """
    node, at = state.granted[place], state.points[place]
    op_s, left = nodes.op_s[at], state.left[node]
    share = guide.shares[node, state.num_jobs[node]]
    ops = ceil((share if share >= 0.0 else min(1.0, state.share[place])) * left - 1e-9)
    if not state.is_enough[place] and next_s < inf and op_s > 0.0:
        ops = min(ops, int(np.rint((next_s - now_s) / op_s)))
    ops = min(max(ops, 1), left)
    end_s = now_s + ops * op_s
    state.jobs[num_jobs, 0], state.jobs[num_jobs, 1], state.jobs[num_jobs, 2] = node, nodes.number[at], ops
    state.times[num_jobs, 0], state.times[num_jobs, 1] = now_s, end_s
    state.num_jobs[node] += 1
    state.left[node] = left - ops
    state.is_ready[node] = 0
    state.end_s[node], state.running[node] = end_s, at
    state.unused[at] -= ops
    if state.unused[at] < FEWEST_LEFT:
        state.unused[at] = 0.0


@compiled
def _release(nodes: MixedNodes, state: MixedState, now_s: float) -> None:
    """Let what ended now be ready again, or its consumers."""
    at_once_s = now_s * (1 + 1e-12)
    for node in range(len(state.end_s)):
        if state.end_s[node] > at_once_s:
            continue
        _take(nodes, state, state.running[node], -1)
        state.end_s[node] = inf
        if state.left[node]:
            state.is_ready[node] = 1
            continue
        for at in range(nodes.consumer_from[node], nodes.consumer_from[node + 1]):
            state.missing[nodes.consumers[at]] -= 1
            if not state.missing[nodes.consumers[at]]:
                state.is_ready[nodes.consumers[at]] = 1
