"""Dispatching towards a common end: whenever devices come free, each ready MetaOp gets as many as it needs to
finish in time, and what is left goes to those that gain most.

How many it needs follows from the linear program: the seconds that a MetaOp and everything after it take
    there, against the seconds that are left until a target end. So what has fallen behind is given more, and
    all end together. There are no waves here and no levels: a MetaOp starts when its inputs have ended,
    whatever else still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spindle_cli.costs.memory import inner_bytes
from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.problem import Node, Problem
from spindle_cli.plan.search import prices

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Guide(NamedTuple):
    """What steers a dispatch. N nodes, at most K nudges.

    A nudge is a change to one decision: the next job of a MetaOp that has had so many.

    Attributes:
        numbers: [3] slack: the target end is the lower bound times 1 + slack; least fit: start a MetaOp on
            fewer devices than it needs only if it gets this share of them; widen, 0 or 1: give devices that
            would stay idle to what starts anyway.
        stretch, urgency: [N] what its seconds in the linear program, and its urgency, are multiplied by.
        num_nudges: [1] how many nudges there are.
        nudged: [K, 2] the node of each, and its number of jobs so far.
        nudges: [K, 4] what each says. Points: allocations further up (or down, if negative) its curve than it
            needs; infinite: as it needs. Share: of its ops that are left, how many to run so; counts only
            with points. Wait, 0 or 1: let it pass once. Urgency: multiplies its urgency.
    """

    numbers: Floats
    stretch: Floats
    urgency: Floats
    num_nudges: Ints
    nudged: Ints
    nudges: Floats


SLACK, LEAST_FIT, WIDEN = range(3)
POINTS, SHARE, WAIT, URGENCY = range(4)


# Widening may cost this much in device-seconds per op: the devices would be idle otherwise.
WIDEN_COST = 1.5
# The share of gradient sums that counts beside messages: most of them pass while others still compute, and
# what several tasks share is summed once.
SUMS_SEEN = 0.25
ALMOST = 1 + 1e-9


class Nodes(NamedTuple):
    """A problem's graph in the direction of a dispatch, as arrays. N nodes, P points of all of them in turn.

    Attributes:
        num_ops, num_inputs: [N].
        last_first: [N] nodes, each behind all that follow it.
        consumer_from: [N + 1] where those that take a node's output begin in `consumers`.
        point_from: [N + 1] where a node's points begin, by devices.
        devices, op_s: [P] of a point.
        bound_op_s: [N] seconds of an op in the linear program.
        input_from, inputs: [N + 1] and as `consumers`, what a node takes from others.
        input_bytes: bytes that each of these hands on, in either direction; inner_bytes: [N] that its ops do.
        byte_s: [P] seconds in which a slice sends or receives a byte (`prices.py`).
        sum_s: [P] seconds that gradient sums of an op take of its devices, times their share of all.
        latency_s: [1] seconds of a message.
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
    bound_op_s: Floats
    input_from: Ints
    inputs: Ints
    input_bytes: Floats
    inner_bytes: Floats
    byte_s: Floats
    sum_s: Floats
    latency_s: Floats
    more: Floats
    wider_s: Floats
    cost: Floats


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
        op_s: [N] seconds of an op in the linear program, stretched.
        last_point: [N] the point of a node's last job; -1: it has had none.
        beside_s: [1] seconds that messages and sums take of devices, on average over all.
        nudge_of: [N, J] which nudge a node's next job has that has had so many; -1: none.
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
    op_s: Floats
    last_point: Ints
    beside_s: Floats
    nudge_of: Ints


def nodes_of(problem: Problem, bound: Bound, *, backwards: bool) -> Nodes:
    """A problem's graph, or that with its edges turned round, and its linear program's seconds."""
    nodes, ints = problem.nodes, np.int64
    before, behind = [node.inputs for node in nodes], [node.consumers for node in nodes]
    if backwards:
        before, behind = behind, before
    more, wider_s, cost = np.array(
        [step for rates in problem.rates for step in _steps_up(rates)], np.float64
    ).T.copy()
    byte_s, sum_s = _prices_of(problem)
    return Nodes(
        num_ops=np.array([node.num_ops for node in nodes], ints),
        num_inputs=np.array(list(map(len, before)), ints),
        last_first=np.array(problem.order if backwards else problem.order[::-1], ints),
        consumer_from=_begins(behind),
        consumers=np.array(list(chain.from_iterable(behind)), ints),
        point_from=_begins(problem.rates),
        devices=np.array([devices for devices, _ in chain.from_iterable(problem.rates)], ints),
        op_s=np.array([op_s for _, op_s in chain.from_iterable(problem.rates)], np.float64),
        bound_op_s=_bound_op_s(problem, bound),
        input_from=_begins(before),
        inputs=np.array(list(chain.from_iterable(before)), ints),
        input_bytes=_input_bytes(nodes, before, backwards=backwards),
        inner_bytes=np.array([float(inner_bytes(node.metaop)) for node in nodes]),
        byte_s=byte_s,
        sum_s=sum_s,
        latency_s=np.array([prices.Message.on(problem.cluster).latency_s]),
        more=more,
        wider_s=wider_s,
        cost=cost,
    )


def _begins(lists: Sequence[Sequence[object]]) -> Ints:
    """Where each of some lists begins in an array of all of them in turn, and where the last one ends."""
    return np.array([0, *accumulate(map(len, lists))], np.int64)


def _bound_op_s(problem: Problem, bound: Bound) -> Floats:
    """Seconds of an op of each node in the linear program."""
    seconds = [
        sum(point.op_s * ops for point, ops in allocation) / node.num_ops
        for node, allocation in zip(problem.nodes, bound.ops, strict=True)
    ]
    return np.array(seconds, np.float64)


def _input_bytes(nodes: Sequence[Node], before: Sequence[Sequence[int]], *, backwards: bool) -> Floats:
    """Bytes that nodes' inputs hand on, node after node. `before`: of each node, those that it takes from."""
    pairs = [(nodes[index], node) for node, indices in zip(nodes, before, strict=True) for index in indices]
    return np.array(
        [prices.edge_bytes(*(pair[::-1] if backwards else pair)) for pair in pairs],
        np.float64,
    )


def _prices_of(problem: Problem) -> tuple[Floats, Floats]:
    """`byte_s` and `sum_s` of `Nodes`: what each point takes for a byte of messages, and for sums."""
    message = prices.Message.on(problem.cluster)
    points = [(node, point) for node in problem.nodes for point in node.points]
    byte_s = [message.seconds_per_byte(inner_bytes(node.metaop), point) for node, point in points]
    sum_s = [
        prices.sum_s(problem, node, point) * point.num_devices / problem.num_devices for node, point in points
    ]
    return np.array(byte_s), np.array(sum_s)


def _steps_up(rates: Sequence[tuple[int, float]]) -> list[tuple[float, float, float]]:
    """From each of a node's points to the next, as `Nodes` has it."""
    steps = [
        (float(wider - devices), wider * wider_s, wider * wider_s / (devices * op_s))
        for (devices, op_s), (wider, wider_s) in pairwise(rates)
    ]
    return [*steps, (inf, inf, inf)]


def guide_for(nodes: Nodes, slack: float, least_fit: float = 0.0, *, widen: bool = True) -> Guide:
    """A guide that has no nudges yet, and room for one of each job that there can be."""
    count, most = len(nodes.num_ops), int(nodes.num_ops.sum())
    return Guide(
        numbers=np.array([slack, least_fit, float(widen)]),
        stretch=np.ones(count),
        urgency=np.ones(count),
        num_nudges=np.zeros(1, np.int64),
        nudged=np.zeros((most, 2), np.int64),
        nudges=np.zeros((most, 4)),
    )


def state_for(nodes: Nodes) -> State:
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
        op_s=floats(),
        last_point=ints(),
        beside_s=np.zeros(1),
        nudge_of=np.full((count, int(nodes.num_ops.max(initial=0)) + 1), -1, np.int64),
    )


@compiled
def dispatch(
    nodes: Nodes, guide: Guide, state: State, num_devices: int, bound_s: float, give_up_s: float
) -> tuple[int, float]:
    """Dispatch until all ops have run: how many jobs, and when the last ends, with the seconds that messages
    and sums take of devices on average; infinite if that is after `give_up_s`.

    Args:
        bound_s: the lower bound of all schedules.
    """
    _begin(nodes, guide, state)
    target_s = bound_s * (1 + guide.numbers[SLACK])
    free, now_s, num_jobs = num_devices, 0.0, 0
    while True:
        if free:
            count = _wishes(nodes, guide, state, now_s, target_s)
            granted = _grant(nodes, guide, state, count, free)
            next_s = inf
            for node in range(len(state.end_s)):
                next_s = min(next_s, state.end_s[node])
            for place in range(granted):
                free -= _start(nodes, state, place, now_s, next_s, num_jobs, num_devices)
                num_jobs += 1
        now_s_then = inf
        for node in range(len(state.end_s)):
            now_s_then = min(now_s_then, state.end_s[node])
        if now_s_then == inf:
            return num_jobs, now_s + state.beside_s[0]
        now_s = now_s_then
        free += _release(nodes, state, now_s)
        if now_s + state.beside_s[0] > give_up_s:
            return num_jobs, inf


@compiled
def _begin(nodes: Nodes, guide: Guide, state: State) -> None:
    """Set what holds before the first job."""
    state.beside_s[0] = 0.0
    for node in range(len(nodes.num_ops)):
        state.last_point[node] = -1
        state.op_s[node] = nodes.bound_op_s[node] * guide.stretch[node]
        for number in range(nodes.num_ops[node] + 1):
            state.nudge_of[node, number] = -1
        state.left[node], state.missing[node] = nodes.num_ops[node], nodes.num_inputs[node]
        state.is_ready[node] = nodes.num_inputs[node] == 0
        state.num_jobs[node], state.waited[node] = 0, -1
        state.end_s[node], state.tail_s[node] = inf, 0.0
    for number in range(guide.num_nudges[0]):
        state.nudge_of[guide.nudged[number, 0], guide.nudged[number, 1]] = number
    for node in nodes.last_first:
        for at in range(nodes.consumer_from[node], nodes.consumer_from[node + 1]):
            behind = nodes.consumers[at]
            tail_s = state.tail_s[behind] + state.op_s[behind] * nodes.num_ops[behind]
            state.tail_s[node] = max(state.tail_s[node], tail_s)


@compiled
def _wishes(nodes: Nodes, guide: Guide, state: State, now_s: float, target_s: float) -> int:
    """Set what each ready node needs to end in time, the most urgent first; how many there are."""
    left_s = max(target_s - now_s, 1e-9 * target_s)
    count = 0
    for node in range(len(state.left)):
        if not state.is_ready[node]:
            continue
        begin, num_points = nodes.point_from[node], nodes.point_from[node + 1] - nodes.point_from[node]
        urgency = (state.left[node] * state.op_s[node] + state.tail_s[node]) / left_s
        wanted_s = state.op_s[node] / urgency * ALMOST
        most = 0
        while most < num_points - 1 and nodes.op_s[begin + most] > wanted_s:
            most += 1
        least, share = most, 1.0
        if most and urgency <= 1.0 and nodes.op_s[begin + most] < wanted_s:
            # Between two allocations: so many ops on the larger that the mix takes `wanted_s` per op.
            least = most - 1
            narrower_s = nodes.op_s[begin + least]
            share = (narrower_s - wanted_s) / (narrower_s - nodes.op_s[begin + most])
        number = state.nudge_of[node, state.num_jobs[node]]
        if number >= 0:
            nudge = guide.nudges[number]
            if nudge[WAIT] and _lets_pass(state, node):
                continue
            urgency *= nudge[URGENCY]
            if nudge[POINTS] != inf:
                least = most = min(max(most + int(nudge[POINTS]), 0), num_points - 1)
                share = nudge[SHARE]
        state.least[node], state.most[node], state.share[node] = least, most, share
        state.key[node] = -urgency * guide.urgency[node]
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
    for running in range(len(state.end_s)):
        if state.end_s[running] < inf:
            state.waited[node] = state.num_jobs[node]
            return True
    return False


@compiled
def _grant(nodes: Nodes, guide: Guide, state: State, count: int, free: int) -> int:
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
            if given > free or given < guide.numbers[LEAST_FIT] * needed:
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
    if guide.numbers[WIDEN]:
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
def _received_s(nodes: Nodes, state: State, node: int, at: int) -> float:
    """Seconds of messages to a node's next job, on a point, and of the gradients that go back: of its longest
    input, or of what the job before hands on. One input that comes from as many devices is there already.
    """
    if state.last_point[node] >= 0:
        from_at = nodes.point_from[node] + state.last_point[node]
        return 0.0 if from_at == at else _message_s(nodes, nodes.inner_bytes[node], from_at, at)
    longest_s, one_is_there = 0.0, False
    for place in range(nodes.input_from[node], nodes.input_from[node + 1]):
        producer = nodes.inputs[place]
        from_at = nodes.point_from[producer] + state.last_point[producer]
        if nodes.devices[from_at] == nodes.devices[at] and not one_is_there:
            one_is_there = True
        else:
            longest_s = max(longest_s, _message_s(nodes, nodes.input_bytes[place], from_at, at))
    return longest_s


@compiled
def _message_s(nodes: Nodes, num_bytes: float, from_at: int, to_at: int) -> float:
    """Seconds in which so many bytes go from the devices of one point to those of another."""
    if not num_bytes:
        return 0.0
    return float(nodes.latency_s[0] + num_bytes * max(nodes.byte_s[from_at], nodes.byte_s[to_at]))


@compiled
def _start(
    nodes: Nodes, state: State, place: int, now_s: float, next_s: float, num_jobs: int, num_devices: int
) -> int:
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
    weight = nodes.devices[at] / num_devices
    state.beside_s[0] += _received_s(nodes, state, node, at) * weight + SUMS_SEEN * nodes.sum_s[at] * ops
    state.last_point[node] = point
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
