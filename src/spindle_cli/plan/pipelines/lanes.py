"""Lanes: disjoint sets of devices, and what runs how long on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf
from operator import le

from spindle_cli.costs.links import transfer_s
from spindle_cli.plan.placing.calendar import first_devices, of_type
from spindle_cli.plan.problem import Node, Point, Problem
from spindle_cli.plan.strategies.baselines import Devices, best_point

# Numbers of lanes that are tried, and most nodes of which each is one.
COUNTS = (2, 3, 4, 6, 8)
MOST_NODES = 8
# On several types, numbers of equal lanes of each type, and most lanes of all.
COUNTS_OF_TYPE = (1, 2, 3, 4)
MOST_LANES = 6


def ways_to_cut(problem: Problem) -> tuple[tuple[Devices, ...], ...]:
    """The cluster cut into lanes: a lane of each node, and equal lanes; on several types of device, as many
    equal lanes of one type as may be of another, or lanes that have equal parts of all types.
    """
    sizes = problem.cluster.node_sizes
    ways: list[tuple[Devices, ...]] = []
    if 1 < len(sizes) <= MOST_NODES:
        firsts = problem.cluster.first_device_of
        ways.append(
            tuple(tuple(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True))
        )
    of_types = [of_type(range(problem.num_devices), kind, problem.cluster) for kind in problem.cluster.types]
    for count in COUNTS:
        parts = [_equal_parts(devices, count) for devices in of_types]
        if all(parts):
            ways.append(tuple(sum(lane, ()) for lane in zip(*parts, strict=True)))
    if len(of_types) > 1:
        ways += _lanes_of_one_type(of_types)
    return tuple(dict.fromkeys(ways))


def _equal_parts(devices: Sequence[int], count: int) -> tuple[Devices, ...]:
    """Devices in turn in so many parts; none where these would not be equal."""
    width, left = divmod(len(devices), count)
    if left or not width:
        return ()
    return tuple(tuple(devices[n * width : (n + 1) * width]) for n in range(count))


def _lanes_of_one_type(of_types: Sequence[Sequence[int]]) -> Iterator[tuple[Devices, ...]]:
    """Each type's devices in equal lanes of their own."""
    for counts in product(COUNTS_OF_TYPE, repeat=len(of_types)):
        parts = [_equal_parts(devices, count) for devices, count in zip(of_types, counts, strict=True)]
        if all(parts) and sum(counts) <= MOST_LANES:
            yield tuple(lane for of_type in parts for lane in of_type)


@dataclass(frozen=True)
class Allocation:
    """What a node runs on in a lane."""

    point: Point
    devices: Devices


def _fastest(problem: Problem, node: Node, lane: Devices) -> Allocation | None:
    """The fastest allocation of a node inside a lane; None where it has none."""
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


class Lanes:
    """A way to cut the cluster, with the allocation of each node in each lane; None where it has none."""

    def __init__(self, problem: Problem, lanes: tuple[Devices, ...]) -> None:
        self.problem = problem
        self.devices = lanes
        self.of_node: list[tuple[Allocation | None, ...]] = [
            tuple(_fastest(problem, node, lane) for lane in lanes) for node in problem.nodes
        ]
        self._known_s: dict[tuple[int, int, int], float] = {}

    @property
    def count(self) -> int:
        """Number of lanes."""
        return len(self.devices)

    @cached_property
    def least_s(self) -> float:
        """Before which no lane that never waits is through with all of its part, however nodes are divided;
        infinite where a node has no allocation.

        If each lane takes T, and p are weights that sum up to 1, T is the weighted mean of what lanes take;
        an op adds no less to it than in the lane where weight times seconds is least. Weights are in
        proportion to speed: of equal lanes all equal, so that this is all work over their number.
        """
        total = sum(self.speed)
        return sum(map(self._least_s, self.problem.nodes)) / total if total else inf

    def _least_s(self, node: Node) -> float:
        weighed = (
            self.speed[lane] * allocation.point.op_s
            for lane, allocation in enumerate(self.of_node[node.index])
            if allocation is not None
        )
        return node.num_ops * min(weighed, default=inf)

    @cached_property
    def speed(self) -> tuple[float, ...]:
        """How much of the work each lane does in the time of the lanes that are fastest with each op: of all
        ops that it has allocations for.
        """
        return tuple(map(self._speed, range(self.count)))

    def _speed(self, lane: int) -> float:
        own_s = least_s = 0.0
        for node in self.problem.nodes:
            if self.of_node[node.index][lane] is not None:
                own_s += node.num_ops * self.op_s(node.index, lane)
                least_s += node.num_ops * self.least_op_s(node.index)
        return least_s / own_s if own_s else 0.0

    def op_s(self, node: int, lane: int) -> float:
        """Seconds of an op of a node in a lane, forward and backward; infinite where it has no allocation."""
        allocation = self.of_node[node][lane]
        return inf if allocation is None else allocation.point.op_s

    def least_op_s(self, node: int) -> float:
        """Seconds of an op in the lane that is fastest."""
        return min(self.op_s(node, lane) for lane in range(self.count))

    def message_s(self, num_bytes: int, source: int, destination: int) -> float:
        """Seconds until `num_bytes` of a whole batch are in another lane: its devices send side by side, and
        those of a node share its network cards.
        """
        key = (num_bytes, source, destination)
        if key not in self._known_s:
            cluster = self.problem.cluster
            ends = [self.devices[lane] for lane in (source, destination)]
            nodes = [{cluster.node_of[device] for device in lane} for lane in ends]
            if nodes[0] == nodes[1]:
                ways, link = min(map(len, ends)), cluster.links_among(nodes[0]).intra_node
            else:
                cards = [len({cluster.card_of[device] for device in lane}) for lane in ends]
                ways, link = min(cards), cluster.links_among(nodes[0] | nodes[1]).inter_node
            self._known_s[key] = transfer_s(num_bytes / ways, link)
        return self._known_s[key]
