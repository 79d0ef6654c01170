"""The planning problem as the algorithms take it: MetaOps by index, curves cut to the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter

from spindle_cli.cluster import Cluster
from spindle_cli.errors import NoPlanError
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile


@dataclass(frozen=True)
class Node:
    """A MetaOp. `points`: its fastest allocation per number of devices, ascending, each faster than all
    before it.

    `inputs` and `consumers` are indices of nodes; `level` is its MetaLevel.
    """

    index: int
    metaop: MetaOpProfile
    points: tuple[CurvePoint, ...]
    inputs: tuple[int, ...]
    consumers: tuple[int, ...]
    level: int

    @property
    def num_ops(self) -> int:
        """Number of ops."""
        return self.metaop.num_ops

    @cached_property
    def shortest_s(self) -> float:
        """Seconds of all its ops on the fastest allocation."""
        return self.num_ops * self.points[-1].op_s


@dataclass(frozen=True)
class Problem:
    """A profile on a cluster. `order`: indices of `nodes`, producers first, otherwise as in the file."""

    profile: Profile
    cluster: Cluster
    nodes: tuple[Node, ...]
    order: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Devices of the cluster."""
        return self.cluster.num_devices

    @cached_property
    def serial_s(self) -> float:
        """Seconds of every MetaOp alone on its fastest allocation, one after another: what is always possible."""
        return sum(node.shortest_s for node in self.nodes)


def make_problem(profile: Profile, cluster: Cluster) -> Problem:
    """Index the MetaGraph and cut the curves to the cluster's number of devices.

    Raises:
        NoPlanError: a MetaOp has no allocation on so few devices.
    """
    index = {metaop.name: i for i, metaop in enumerate(profile.metaops)}
    inputs = [tuple(index[name] for name in metaop.inputs) for metaop in profile.metaops]
    order = _order(inputs)
    level = [0] * len(inputs)
    for i in order:
        level[i] = max((level[j] + 1 for j in inputs[i]), default=0)
    nodes = tuple(
        Node(
            index=i,
            metaop=metaop,
            points=useful_points(metaop, cluster.num_devices),
            inputs=inputs[i],
            consumers=tuple(j for j, producers in enumerate(inputs) if i in producers),
            level=level[i],
        )
        for i, metaop in enumerate(profile.metaops)
    )
    return Problem(profile, cluster, nodes, order)


def useful_points(metaop: MetaOpProfile, num_devices: int) -> tuple[CurvePoint, ...]:
    """The allocations that no smaller one equals: ascending in devices, strictly descending in seconds.

    Raises:
        NoPlanError: none is on at most `num_devices` devices.
    """
    points: list[CurvePoint] = []
    for point in metaop.best_points:
        if point.num_devices <= num_devices and (not points or point.op_s < points[-1].op_s):
            points.append(point)
    if not points:
        fewest = metaop.best_points[0].num_devices
        raise NoPlanError(
            f"{metaop.name}: its smallest valid allocation has {fewest} devices, the cluster {num_devices}",
            hint=f"Plan for at least {fewest} devices, or profile {metaop.name} for fewer.",
        )
    return tuple(points)


def _order(inputs: list[tuple[int, ...]]) -> tuple[int, ...]:
    sorter: TopologicalSorter[int] = TopologicalSorter(dict(enumerate(inputs)))
    sorter.prepare()
    order: list[int] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order.extend(ready)
        sorter.done(*ready)
    return tuple(order)
