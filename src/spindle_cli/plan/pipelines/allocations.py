"""What each node runs on inside a lane: the fastest allocation; or that of the heaviest node that it takes
from or hands on to, where what moves between the two would take longer than is gained.

An embedding may be fastest on one node of a lane; but then all that it makes would leave through that node's
network card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import le

from spindle_cli.account.activations import Layout, busiest_s, handed_over
from spindle_cli.costs.memory import inner_bytes
from spindle_cli.costs.shares import times_of
from spindle_cli.plan.placing.calendar import first_devices
from spindle_cli.plan.problem import Node, Point, Problem
from spindle_cli.plan.strategies.baselines import Devices, best_point
from spindle_cli.plan.types import Slice


@dataclass(frozen=True)
class Allocation:
    """What a node runs on in a lane."""

    point: Point
    devices: Devices

    def layout(self, batch_size: int) -> Layout:
        """Who has which samples."""
        return Layout(self.devices, self.point.dp, self.point.tp, batch_size, offsets=self.point.rows)


def allocations_in(problem: Problem, lane: Devices) -> list[Allocation | None]:
    """The allocation of each node inside a lane; None where it has none."""
    fastest = [_fastest(problem, node, lane) for node in problem.nodes]
    return [
        allocation if allocation is None else _near_others(problem, node, allocation, fastest)
        for node, allocation in zip(problem.nodes, fastest, strict=True)
    ]


def _fastest(problem: Problem, node: Node, lane: Devices) -> Allocation | None:
    cluster = problem.cluster
    types = [cluster.type_of[device] for device in lane]
    counts = [types.count(kind) for kind in cluster.types]
    if node.points[0].counts is None:
        point = best_point(node, len(lane))
    else:
        has_room = (point for point in node.points if all(map(le, point.counts or (), counts)))
        point = min(has_room, key=lambda point: (point.op_s, point.num_devices), default=None)
    devices = None if point is None else first_devices(cluster, point, lane)
    return None if point is None or devices is None else Allocation(point, devices)


def _near_others(
    problem: Problem, node: Node, allocation: Allocation, fastest: Sequence[Allocation | None]
) -> Allocation:
    neighbours = [
        (problem.nodes[number], neighbour)
        for number in sorted((*node.inputs, *node.consumers))
        if (neighbour := fastest[number]) is not None
    ]
    if not neighbours:
        return allocation
    heaviest, theirs = max(neighbours, key=lambda neighbour: neighbour[0].num_ops * neighbour[1].point.op_s)
    near = None if allocation.devices == theirs.devices else _as(problem, node, theirs, heaviest)
    if near is None:
        return allocation
    batch_size, num_bytes = node.metaop.batch_size, _bytes_between(node, heaviest)
    moved = handed_over(allocation.layout(batch_size), theirs.layout(batch_size), num_bytes, problem.cluster)
    there_s = busiest_s(moved.sends, problem.cluster) + moved.gather_s
    here_s, near_s = (node.num_ops * some.point.op_s for some in (allocation, near))
    return near if near_s < here_s + 2 * there_s else allocation


def _as(problem: Problem, node: Node, theirs: Allocation, whose: Node) -> Allocation | None:
    """A node on the devices of another one, which have the same samples; None where it cannot be cut so.

    Args:
        theirs: what the other node, `whose`, runs on.
    """
    metaop, point = node.metaop, theirs.point
    is_cut_alike = point.rows is None and metaop.batch_size % point.dp == 0
    if metaop.batch_size != whose.metaop.batch_size and not is_cut_alike:
        return None
    if node.points[0].selective and point.tp > 1:
        return None
    slice_ = Slice(
        metaop=metaop.name,
        ops=(node.first_op, node.first_op + node.num_ops),
        devices=theirs.devices,
        dp=point.dp,
        tp=point.tp,
        rows=point.rows,
        start_s=0.0,
        end_s=0.0,
        recompute=node.points[0].recompute,
        selective=node.points[0].selective,
    )
    if times_of(metaop, slice_, problem.cluster) is None:
        return None
    return Allocation(problem.point_of(slice_), theirs.devices)


def _bytes_between(node: Node, neighbour: Node) -> int:
    """Bytes of the whole batch that one of two neighbours hands to the other."""
    if node.metaop.name == neighbour.metaop.name:
        return inner_bytes(node.metaop)
    producer = neighbour if neighbour.index in node.inputs else node
    return producer.metaop.output_bytes
