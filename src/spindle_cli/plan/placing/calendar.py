"""When each device comes free while a schedule's pieces are placed, and whom a slice may take.

A schedule counts devices; which of them are free together it does not know. A tensor-parallel group needs
devices of one node, and those that are free may lie on several: the slice then waits until whole groups are
free, and all that comes after it is late too. `exact_slices` works out the times that follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.problem import Point, Problem
from spindle_cli.plan.schedule import Candidate, UnplacedSlice


class Calendar:
    """Until when each device is taken."""

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self._problem = problem
        self._cluster = problem.cluster
        self._free_s = [0.0] * problem.num_devices
        self._end_s = [0.0] * len(problem.nodes)  # of each node's latest slice
        self._eps_s = 1e-9 * candidate.end_s
        self._is_late = False  # whether a slice has had to wait, so that others may have to

    def available(self, slice_: UnplacedSlice, with_room: Callable[[Sequence[int]], list[int]]) -> list[int]:
        """Devices from which `slice` can take whole groups, at the first time at which there are enough;
        fewer than that where no time helps. `with_room` picks out those that have room for it.
        """
        start_s = self._start_s(slice_) + self._eps_s
        free = [device for device, free_s in enumerate(self._free_s) if free_s <= start_s]
        if not self._is_late and self._has_groups(free, slice_):
            return with_room(free)
        roomy = with_room(range(len(self._free_s)))
        available: list[int] = []
        for time_s in sorted({max(start_s, self._free_s[device]) for device in roomy}):
            available = [device for device in roomy if self._free_s[device] <= time_s]
            if self._has_groups(available, slice_):
                break
        return available

    def take(self, slice_: UnplacedSlice, devices: Sequence[int]) -> None:
        """Let `slice` run on these devices as soon as all of them are free."""
        start_s = max(self._start_s(slice_), *(self._free_s[device] for device in devices))
        if start_s > slice_.start_s + self._eps_s:
            self._is_late = True
        end_s = slice_.end_s if not self._is_late else start_s + slice_.end_s - slice_.start_s
        self._end_s[slice_.node] = end_s
        for device in devices:
            self._free_s[device] = end_s

    def _start_s(self, slice_: UnplacedSlice) -> float:
        """When the schedule, or what the slice waits for, lets it start."""
        if not self._is_late:
            return slice_.start_s
        inputs = self._problem.nodes[slice_.node].inputs
        return max(slice_.start_s, self._end_s[slice_.node], *(self._end_s[i] for i in inputs))

    def _has_groups(self, devices: Sequence[int], slice_: UnplacedSlice) -> bool:
        return has_groups(devices, slice_.point, self._cluster)


def has_groups(devices: Sequence[int], point: Point, cluster: Cluster) -> bool:
    """Whether an allocation can have its tensor-parallel groups of some devices; of each type its own."""
    if point.counts is None:
        return num_groups(devices, point.tp, cluster.node_of) >= point.dp
    return all(
        num_groups(of_type(devices, kind, cluster), point.tp, cluster.node_of) * point.tp >= count
        for kind, count in zip(cluster.types, point.counts, strict=True)
        if count
    )


def of_type(devices: Sequence[int], kind: str, cluster: Cluster) -> list[int]:
    """Those of a type."""
    return [device for device in devices if cluster.type_of[device] == kind]


def num_groups(devices: Sequence[int], tp: int, node_of: Sequence[int]) -> int:
    """How many groups of `tp` devices of one node can be made of some devices."""
    if tp == 1:
        return len(devices)
    return sum(count // tp for count in Counter(node_of[device] for device in devices).values())


def whole_groups(devices: Sequence[int], dp: int, tp: int, node_of: Sequence[int]) -> tuple[int, ...] | None:
    """The first `dp` groups of `tp` devices of one node each, node by node in the order of `devices`; None if
    there are not as many.
    """
    by_node: dict[int, list[int]] = {}
    for device in devices:
        by_node.setdefault(node_of[device], []).append(device)
    chosen: list[int] = []
    for members in by_node.values():
        chosen += members[: len(members) // tp * tp]
    return tuple(chosen[: dp * tp]) if len(chosen) >= dp * tp else None


def first_devices(cluster: Cluster, point: Point, among: Sequence[int]) -> tuple[int, ...] | None:
    """The first of some devices for an allocation, on several types of each as many as it takes; None where
    it has no room among them.
    """
    if point.counts is None:
        return whole_groups(among, point.dp, point.tp, cluster.node_of)
    chosen: tuple[int, ...] = ()
    for kind, count in zip(cluster.types, point.counts, strict=True):
        groups = whole_groups(of_type(among, kind, cluster), count // point.tp, point.tp, cluster.node_of)
        if groups is None:
            return None
        chosen += groups
    return chosen
