"""Lanes: disjoint sets of devices, one after another in the cluster, and what runs how long on each."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from spindle_cli.costs.links import transfer_s
from spindle_cli.plan.problem import Point, Problem
from spindle_cli.plan.strategies.lanes import Devices, best_point, first_of

# Numbers of lanes that are tried, and most nodes of which each is one.
COUNTS = (2, 3, 4, 6, 8)
MOST_NODES = 8


def ways_to_cut(problem: Problem) -> tuple[tuple[Devices, ...], ...]:
    """The cluster cut into lanes: a lane of each node, and equal lanes."""
    sizes = problem.cluster.node_sizes
    ways = []
    if 1 < len(sizes) <= MOST_NODES:
        firsts = problem.cluster.first_device_of
        ways.append(
            tuple(tuple(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True))
        )
    for count in COUNTS:
        width, left = divmod(problem.num_devices, count)
        if width and not left:
            ways.append(tuple(tuple(range(n * width, (n + 1) * width)) for n in range(count)))
    return tuple(dict.fromkeys(ways))


@dataclass(frozen=True)
class Allocation:
    """What a node runs on in a lane."""

    point: Point
    devices: Devices


class Lanes:
    """A way to cut the cluster, with the allocation of each node in each lane; None where it has none."""

    def __init__(self, problem: Problem, lanes: tuple[Devices, ...]) -> None:
        self.problem = problem
        self.devices = lanes
        self.of_node = [
            [_allocation(problem, number, lane) for lane in lanes] for number in range(len(problem.nodes))
        ]
        self._known_s: dict[tuple[int, int, int], float] = {}

    @property
    def count(self) -> int:
        """Number of lanes."""
        return len(self.devices)

    @property
    def least_s(self) -> float:
        """Seconds until all is through if no lane ever waits; infinite where a node has no allocation."""
        return sum(self.least_op_s(node.index) * node.num_ops for node in self.problem.nodes) / self.count

    def least_op_s(self, node: int) -> float:
        """Seconds of an op of a node, forward and backward, in the lane that is fastest."""
        seconds = [each.point.op_s for each in self.of_node[node] if each is not None]
        return min(seconds, default=inf)

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


def _allocation(problem: Problem, number: int, lane: Devices) -> Allocation | None:
    """The fastest allocation of a node inside a lane."""
    point = best_point(problem.nodes[number], len(lane))
    devices = None if point is None else first_of(problem, lane, point)
    if point is None or devices is None:
        return None
    return Allocation(point, devices)
