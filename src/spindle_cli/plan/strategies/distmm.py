"""`distmm`: tasks one after another; within a task the devices are split among its independent MetaOps.

After DistMM (NSDI 2024), which runs the towers of one multi-modal task side by side. Each group of a task's
MetaOps that do not depend on each other is split so that the slowest is as fast as can be, or run one after
another on all devices where that is faster.
"""

from __future__ import annotations

from functools import partial
from math import inf

from spindle_cli.plan.placing.calendar import first_devices
from spindle_cli.plan.problem import Node, Problem
from spindle_cli.plan.schedule import Draft, UnplacedSlice, whole_slice
from spindle_cli.plan.strategies.lanes import (
    Devices,
    all_or_none,
    best_point,
    split_evenly_in_time,
)
from spindle_cli.profile.metagraph import CycleError, producers_first


def distmm(problem: Problem) -> Draft:
    """The schedule; shares are consecutive devices."""
    everywhere = range(problem.num_devices)
    pieces: list[UnplacedSlice] = []
    devices: list[Devices | None] = []
    after: list[int] = []
    now_s = 0.0
    for group in _groups(problem):
        shares = split_evenly_in_time([partial(_seconds, node) for node in group], problem.num_devices)
        in_turn_s = sum(node.shortest_s for node in group)
        if shares is not None and len(group) > 1:
            side_by_side_s = max(_seconds(node, n) for node, n in zip(group, shares, strict=True))
        else:
            side_by_side_s = inf
        if shares is None or in_turn_s <= side_by_side_s:
            for node in group:
                after.append(len(pieces))
                pieces.append(whole_slice(node, node.points[-1], now_s, now_s + node.shortest_s))
                devices.append(first_devices(problem.cluster, node.points[-1], everywhere))
                now_s += node.shortest_s
            continue
        first = 0
        after += [len(pieces)] * len(group)
        for node, share in zip(group, shares, strict=True):
            point = best_point(node, share)
            assert point is not None, "a share is at least the smallest allocation"
            pieces.append(whole_slice(node, point, now_s, now_s + node.num_ops * point.op_s))
            devices.append(first_devices(problem.cluster, point, everywhere[first : first + share]))
            first += share
        now_s += side_by_side_s
    return Draft("distmm", tuple(pieces), all_or_none(devices), tuple(after))


def _seconds(node: Node, num_devices: int) -> float:
    point = best_point(node, num_devices)
    return inf if point is None else node.num_ops * point.op_s


def _groups(problem: Problem) -> list[list[Node]]:
    """Task by task, the MetaOps of each of its levels. Tasks that consume each other count as one."""
    inputs: dict[str, dict[str, None]] = {node.metaop.task: {} for node in problem.nodes}
    for node in problem.nodes:
        others = (problem.nodes[j].metaop.task for j in node.inputs)
        inputs[node.metaop.task].update((task, None) for task in others if task != node.metaop.task)
    try:
        unit_of = {task: place for place, task in enumerate(producers_first(inputs))}
    except CycleError:
        unit_of = dict.fromkeys(inputs, 0)
    groups: dict[tuple[int, int], list[Node]] = {}
    for node in problem.nodes:
        groups.setdefault((unit_of[node.metaop.task], node.level), []).append(node)
    return [groups[key] for key in sorted(groups)]
