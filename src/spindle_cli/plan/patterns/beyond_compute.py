"""What sums of gradients, and activations that move, add to a schedule, as far as that is known without
devices: an estimate by which schedules are chosen that are placed and predicted (`placing/predict.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf
from typing import TypeAlias

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
# How much of what activations take from allocation to allocation adds to an iteration: other devices compute
# meanwhile.
MOVING_ADDS = 0.5

# When some seconds of sums of each type's devices come at once, and from when on more or fewer of them, each
# second.
_Arrival: TypeAlias = tuple[float, tuple[float, ...], tuple[float, ...]]


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
        self._nothing = (0.0,) * len(self._room)
        self._seconds = cache(self._seconds_of)
        # Of a sum, the part before the update.
        self._summed = 0.5 if problem.profile.optimizer_state_sharded else 1.0
        self._bytes = list(bytes_of_users.values())
        self._sums_of: list[list[int]] = [[] for _ in problem.nodes]
        for number, users in enumerate(self._users):
            for node in users:
                self._sums_of[node].append(number)

    def added_s(self, timed: Sequence[Timed]) -> float:
        """About how much longer an iteration is than a schedule of whole MetaOps.

        Parameters that the same MetaOps use are summed over all devices that run any of these: over as many
        of each type as the largest of their jobs has, if the placement puts the others on some of these.
        Devices of a type are taken to have equal parts of the type's sums.
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
        return moving_s + self._sums_s(self._arrivals(devices, first_s, last_s))

    def _arrivals(
        self, devices: Sequence[tuple[int, ...]], first_s: Sequence[float], last_s: Sequence[float]
    ) -> list[_Arrival]:
        """The sums that come in a schedule, from its start, in order."""
        found: list[_Arrival] = []
        for number, users in enumerate(self._users):
            start_s = min([first_s[node] for node in users])
            lasts_s = min([last_s[node] for node in users]) - start_s
            at_once, spread = self._seconds(number, devices[number])
            rates = tuple([seconds / lasts_s for seconds in spread])
            found.append((start_s, at_once, rates))
            found.append((start_s + lasts_s, self._nothing, tuple([-rate for rate in rates])))
        found.sort()
        return found

    def _sums_s(self, arrivals: Iterable[_Arrival]) -> float:
        """What sums take longer than what they hide behind: those of what comes t seconds from the start of a
        schedule, and before, behind the backward passes of the same, `BACKWARD` t. Of shared-out state
        updated parameters are gathered behind the forward passes before that.
        """
        waiting_s, rates = list(self._nothing), list(self._nothing)
        before_s = late_s = late_gathered_s = 0.0
        for at_s, at_once, more in arrivals:
            for kind, rate in enumerate(rates):
                waiting_s[kind] += rate * (at_s - before_s) + at_once[kind]
                rates[kind] = rate + more[kind]
            before_s, longest_s = at_s, max(waiting_s)
            late_s = max(late_s, self._summed * longest_s - BACKWARD * at_s)
            late_gathered_s = max(late_gathered_s, (1 - self._summed) * longest_s - (1 - BACKWARD) * at_s)
        return late_s + late_gathered_s

    def _seconds_of(self, number: int, devices: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
        """What a device of each type spends on a sum over so many devices of each: for one op, before which
        it cannot begin, and for the others, which come one after the other.
        """
        sum_s = self._bytes[number] * self._s_per_byte(devices)
        each = [sum_s * count / room for count, room in zip(devices, self._room, strict=True)]
        num_ops = min(self._problem.nodes[node].num_ops for node in self._users[number])
        one = tuple(seconds / num_ops for seconds in each)
        return one, tuple(seconds - own for seconds, own in zip(each, one, strict=True))

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
    """For each point, what the activations that a node's ops hand on to each other take to or from as many
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
