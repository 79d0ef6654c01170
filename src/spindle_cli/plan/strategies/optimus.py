"""`optimus`: devices split among the tasks by marginal gain, each task inside its own devices.

After Optimus (EuroSys 2018), which gives a cluster's devices to the job that gains most from one more. As an
iteration lasts until its last task, that is always the slowest. Where it is faster, or where the tasks do not
fit side by side, tasks share devices and run in turn on them, the longest dealt out first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf

from spindle_cli.plan.placing.calendar import first_devices
from spindle_cli.plan.problem import Node, Problem
from spindle_cli.plan.schedule import Draft, UnplacedSlice, whole_slice
from spindle_cli.plan.strategies.lanes import (
    Devices,
    Seconds,
    all_or_none,
    best_point,
    split_evenly_in_time,
)


def optimus(problem: Problem) -> Draft:
    """The schedule; the devices of a task are consecutive."""
    tasks: dict[str, list[Node]] = {}
    for i in problem.order:
        tasks.setdefault(problem.nodes[i].metaop.task, []).append(problem.nodes[i])
    found: list[Draft] = []
    for num_lanes in range(min(len(tasks), problem.num_devices), 0, -1):
        lanes = _deal(list(tasks.values()), num_lanes)
        shares = split_evenly_in_time([_seconds_of(lane) for lane in lanes], problem.num_devices)
        if shares is not None:
            found.append(_draft(problem, lanes, shares))
    return min(found, key=lambda draft: draft.end_s)  # of equals the one with most lanes


def _deal(tasks: Sequence[list[Node]], num_lanes: int) -> list[list[Node]]:
    """Tasks to lanes: the longest first, each to the lane with least to do; work counted on the least
    devices.
    """
    work = [
        sum(node.num_ops * node.points[0].op_s * node.points[0].num_devices for node in task)
        for task in tasks
    ]
    lanes: list[list[Node]] = [[] for _ in range(num_lanes)]
    load = [0.0] * num_lanes
    for i in sorted(range(len(tasks)), key=lambda i: -work[i]):
        lane = min(range(num_lanes), key=lambda lane: load[lane])
        lanes[lane] += tasks[i]
        load[lane] += work[i]
    return lanes


def _seconds_of(lane: Sequence[Node]) -> Seconds:
    @cache
    def seconds(num_devices: int) -> float:
        total_s = 0.0
        for node in lane:
            point = best_point(node, num_devices)
            total_s += inf if point is None else node.num_ops * point.op_s
        return total_s

    return seconds


def _draft(problem: Problem, lanes: Sequence[Sequence[Node]], shares: Sequence[int]) -> Draft:
    """Run each lane's MetaOps in turn; one that takes input from another lane waits for it."""
    lane_of: dict[int, tuple[int, int, int]] = {}  # node -> (lane, first device, number of devices)
    first = 0
    for number, (lane, share) in enumerate(zip(lanes, shares, strict=True)):
        lane_of |= {node.index: (number, first, share) for node in lane}
        first += share
    free_s = [0.0] * len(lanes)
    end_s = [0.0] * len(problem.nodes)
    placed: list[tuple[UnplacedSlice, Devices | None]] = []
    for i in problem.order:
        node = problem.nodes[i]
        number, first, share = lane_of[i]
        point = best_point(node, share)
        assert point is not None, "a lane's share is at least the smallest allocation of each of its MetaOps"
        start_s = max([free_s[number], *(end_s[j] for j in node.inputs)])
        end_s[i] = free_s[number] = start_s + node.num_ops * point.op_s
        piece = whole_slice(node, point, start_s, end_s[i])
        placed.append((piece, first_devices(problem.cluster, point, range(first, first + share))))
    placed.sort(key=lambda item: item[0].start_s)
    pieces, devices = zip(*placed, strict=True)
    return Draft("optimus", pieces, all_or_none(devices))
