"""What sums of gradients, and activations that move, add to a schedule, as far as that is known without
devices: an estimate by which schedules are chosen that are placed and predicted (`placing/predict.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf

from spindle_cli.account.groups import ParameterBlock
from spindle_cli.costs.links import bandwidth_bytes_per_s, per_node, spread_all_reduce_s
from spindle_cli.costs.memory import inner_bytes
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.problem import Node, Point, Problem
from spindle_cli.plan.search.listing import Timed
from spindle_cli.units import MIB

# Sums are of about so many bytes (`account/groups.py`): what a byte takes of one.
SUM_BYTES = 64 * MIB
# Of a schedule, the part that is backward passes, which run in reverse.
BACKWARD = 2 / 3
# A MetaOp's gradients come one after the other while it runs backward: as if all came once this part of it is
# left.
LATE = 0.25
# How much of what activations take from allocation to allocation adds to an iteration: other devices compute
# meanwhile.
MOVING_ADDS = 0.5


class BeyondCompute:
    """What is added to schedules of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._room = problem.devices_of_types
        self._s_per_byte = cache(partial(_s_per_byte, cluster=problem.cluster))
        self._counts = [[point.of_types for point in node.points] for node in problem.nodes]
        self._moving_s = [_moving_s(problem, node) for node in problem.nodes]
        bytes_of_users = _bytes_by_users(problem)
        self._users = list(bytes_of_users)
        self._bytes = list(bytes_of_users.values())
        self._sums_of: list[list[int]] = [[] for _ in problem.nodes]
        for number, users in enumerate(self._users):
            for node in users:
                self._sums_of[node].append(number)

    def added_s(self, timed: Sequence[Timed]) -> float:
        """About how much longer an iteration is than a schedule of whole MetaOps.

        Parameters that the same MetaOps use are summed over all devices that run any of these: over as many
        of each type as the largest of their jobs has, if the placement puts the others on some of these. What
        starts first forward ends last backward: its sums hide behind nothing, those of what comes after t
        seconds behind the backward passes of what is before, `BACKWARD` t. Devices of a type are taken to
        have equal parts of the type's sums.
        """
        first_s, last_s = [inf] * len(self._counts), [0.0] * len(self._counts)
        points = [-1] * len(self._counts)
        devices: list[tuple[int, ...]] = [()] * len(self._bytes)
        moving_s = 0.0
        for (node, point, _), start_s, end_s in timed:
            first_s[node], last_s[node] = min(first_s[node], start_s), max(last_s[node], end_s)
            before, points[node] = points[node], point
            if before == point:
                continue
            if before >= 0:
                moving_s += min(self._moving_s[node][before], self._moving_s[node][point])
            own = self._counts[node][point]
            for number in self._sums_of[node]:
                known = devices[number]
                devices[number] = tuple(map(max, known, own)) if known else own
        return moving_s + self._sums_s(
            devices, [self._complete_s(users, first_s, last_s) for users in self._users]
        )

    def _complete_s(self, users: frozenset[int], first_s: Sequence[float], last_s: Sequence[float]) -> float:
        """How far from the start of a schedule, counted in forward time, sums of some nodes begin."""
        node = min(users, key=first_s.__getitem__)
        return first_s[node] + LATE * (last_s[node] - first_s[node])

    def _sums_s(self, devices: Sequence[tuple[int, ...]], complete_s: Sequence[float]) -> float:
        """What sums over so many devices of each type take longer than what they hide behind."""
        waiting_s = [0.0] * len(self._room)
        longest_s = 0.0
        for number in sorted(range(len(complete_s)), key=complete_s.__getitem__):
            sum_s = self._bytes[number] * self._s_per_byte(devices[number])
            for kind, count in enumerate(devices[number]):
                if count:
                    waiting_s[kind] += sum_s * count / self._room[kind]
                    longest_s = max(longest_s, waiting_s[kind] - BACKWARD * complete_s[number])
        return longest_s

    def counted(self, weight: float) -> Problem:
        """The problem with times of ops that include this share of the sums of their own gradients."""
        if not weight:
            return self._problem
        nodes = tuple(replace(node, points=self._longer(node, weight)) for node in self._problem.nodes)
        return replace(self._problem, nodes=nodes)

    def _longer(self, node: Node, weight: float) -> tuple[Point, ...]:
        blocks = list(_trained(self._problem, node))
        split = sum(block.num_bytes for block in blocks if block.split) / node.num_ops
        whole = sum(block.num_bytes for block in blocks if not block.split) / node.num_ops
        width = weight * self._problem.profile.gradient_bytes_per_param
        return tuple(
            replace(
                point,
                op_s=point.op_s + width * (split / point.tp + whole) * self._s_per_byte(point.of_types),
            )
            for point in node.points
        )


def _trained(problem: Problem, node: Node) -> Iterator[ParameterBlock]:
    for op in range(node.first_op, node.first_op + node.num_ops):
        yield from (block for block in problem.uses[node.metaop.name, op] if block.is_trained)


def _bytes_by_users(problem: Problem) -> dict[frozenset[int], float]:
    """By the nodes that use some parameters, the bytes of their gradients."""
    users: dict[tuple[str, int], set[int]] = {}
    num_bytes: dict[tuple[str, int], int] = {}
    for node in problem.nodes:
        for block in _trained(problem, node):
            users.setdefault((block.key, block.block), set()).add(node.index)
            num_bytes[block.key, block.block] = block.num_bytes
    found: dict[frozenset[int], float] = {}
    for name, own in users.items():
        of_all = frozenset(own)
        found[of_all] = found.get(of_all, 0.0) + num_bytes[name] * problem.profile.gradient_bytes_per_param
    return found


def _moving_s(problem: Problem, node: Node) -> list[float]:
    """Of each point, what the activations that a node's ops hand on to each other take to or from as many
    devices on other nodes of the cluster, with their gradients: as much as that adds.
    """
    links = problem.cluster.links
    slowest = min(bandwidth_bytes_per_s(SUM_BYTES, link) for link in (links.inter_node, *links.between))
    both_s = 2 * inner_bytes(node.metaop) / slowest
    return [MOVING_ADDS * both_s / point.num_devices for point in node.points]


def _s_per_byte(counts: Sequence[int], cluster: Cluster) -> float:
    """Seconds that a byte of a sum takes over so many devices of each type, on the first nodes that have
    them.
    """
    devices: list[int] = []
    for kind, count in zip(cluster.types, counts, strict=True):
        own = (device for device, other in enumerate(cluster.type_of) if other == kind)
        devices += [device for device, _ in zip(own, range(count), strict=False)]
    return spread_all_reduce_s(SUM_BYTES, per_node(devices, cluster), cluster) / SUM_BYTES
