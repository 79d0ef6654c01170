"""Arranging: exchanging devices between nodes in a placed schedule, so that sums and transfers stay inside.

Which device does what is settled by the placement; any renumbering of the devices keeps the schedule. Sums
are fast over whole nodes and slow over a few devices of each, so pairs of devices of different nodes are
exchanged as long as that lowers

    seconds of sums of the busiest device, and of the average one, and what transfers take longer between
    nodes

Deterministic: the pairs come from a fixed seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from spindle_cli.costs.links import spread_all_reduce_s, transfer_s
from spindle_cli.plan.predict import flows, messages, shared_parameters
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Placed


def arrange(problem: Problem, placed: Placed, num_exchanges: int) -> Placed:
    """The same schedule with devices exchanged between nodes, after so many tries."""
    if len(problem.cluster.node_sizes) == 1 or any(piece.point.tp > 1 for piece in placed.draft.pieces):
        return placed  # one node; or shares whose devices must stay together
    arrangement = _Arrangement(problem, placed)
    random = Random(0)  # noqa: S311 - reproducible, not secret
    for _ in range(num_exchanges):
        arrangement.try_exchange(random.randrange(problem.num_devices), random.randrange(problem.num_devices))
    place = arrangement.place
    return Placed(placed.draft, tuple(tuple(place[d] for d in devices) for devices in placed.devices))


class _Arrangement:
    """Where each device of the placement goes, and what that costs."""

    def __init__(self, problem: Problem, placed: Placed) -> None:
        self.cluster = problem.cluster
        self.node_of = problem.cluster.node_of
        self.place = list(range(problem.num_devices))
        self._make_groups(problem, placed)
        self._make_neighbours(problem, placed)
        self.cost_s = self._sums_cost_s(self.sum_s)

    def _make_groups(self, problem: Problem, placed: Placed) -> None:
        """Sets of devices that sum gradients together; devices in the same ones are of one kind."""
        num_bytes: dict[frozenset[int], float] = {}
        for members, (size, _) in shared_parameters(problem, placed.draft.pieces).items():
            devices = frozenset(d for index in members for d in placed.devices[index])
            if len(devices) > 1:
                num_bytes[devices] = num_bytes.get(devices, 0.0) + size
        self.num_bytes = list(num_bytes.values())
        self.groups_of: list[frozenset[int]] = []
        for device in range(problem.num_devices):
            self.groups_of.append(frozenset(g for g, devices in enumerate(num_bytes) if device in devices))
        self.spread = [[0] * len(self.cluster.node_sizes) for _ in num_bytes]
        for device, groups in enumerate(self.groups_of):
            for group in groups:
                self.spread[group][self.node_of[device]] += 1
        self._known_s: dict[tuple[int, tuple[int, ...]], float] = {}
        self.sum_s = [self._group_s(group) for group in range(len(num_bytes))]
        self.kinds = list(Counter(self.groups_of).items())

    def _make_neighbours(self, problem: Problem, placed: Placed) -> None:
        """For each device, whom it exchanges tensors with, and the seconds that this takes longer between
        nodes.
        """
        links = self.cluster.links
        longer_s: dict[tuple[int, int], float] = {}
        for flow in flows(problem, placed.draft.pieces):
            for sender, taker, num_bytes in messages(placed.draft.pieces, placed.devices, flow):
                extra_s = transfer_s(num_bytes, links.inter_node) - transfer_s(num_bytes, links.intra_node)
                pair = (min(sender, taker), max(sender, taker))
                # There and, as a gradient, back; of one device on average.
                longer_s[pair] = longer_s.get(pair, 0.0) + 2 * extra_s / problem.num_devices
        self.neighbours: list[list[tuple[int, float]]] = [[] for _ in range(problem.num_devices)]
        for (a, b), seconds in longer_s.items():
            self.neighbours[a].append((b, seconds))
            self.neighbours[b].append((a, seconds))

    def try_exchange(self, a: int, b: int) -> None:
        """Exchange the places of two devices if that costs less."""
        place, node_of = self.place, self.node_of
        node_a, node_b = node_of[place[a]], node_of[place[b]]
        if node_a == node_b:
            return
        only_a, only_b = self.groups_of[a] - self.groups_of[b], self.groups_of[b] - self.groups_of[a]
        before_s = self._between_s(a, b)
        self._move(only_a, node_a, node_b)
        self._move(only_b, node_b, node_a)
        place[a], place[b] = place[b], place[a]
        sum_s = self.sum_s
        if only_a or only_b:
            sum_s = list(sum_s)
            for group in only_a | only_b:
                sum_s[group] = self._group_s(group)
        cost_s = self._sums_cost_s(sum_s)
        if cost_s + self._between_s(a, b) < self.cost_s + before_s:
            self.sum_s, self.cost_s = sum_s, cost_s
            return
        place[a], place[b] = place[b], place[a]
        self._move(only_a, node_b, node_a)
        self._move(only_b, node_a, node_b)

    def _move(self, groups: frozenset[int], source: int, destination: int) -> None:
        for group in groups:
            self.spread[group][source] -= 1
            self.spread[group][destination] += 1

    def _group_s(self, group: int) -> float:
        spread = tuple(sorted(count for count in self.spread[group] if count))
        key = (group, spread)
        if key not in self._known_s:
            self._known_s[key] = spread_all_reduce_s(self.num_bytes[group], spread, self.cluster)
        return self._known_s[key]

    def _sums_cost_s(self, sum_s: Sequence[float]) -> float:
        busiest_s = total_s = 0.0
        for groups, count in self.kinds:
            own_s = sum(sum_s[group] for group in groups)
            busiest_s = max(busiest_s, own_s)
            total_s += count * own_s
        return busiest_s + total_s / len(self.place)

    def _between_s(self, a: int, b: int) -> float:
        """Seconds that what the two devices exchange with others takes longer for crossing nodes."""
        total_s = 0.0
        for device in (a, b):
            own = self.node_of[self.place[device]]
            for other, seconds in self.neighbours[device]:
                if self.node_of[self.place[other]] != own:
                    total_s += seconds
        return total_s
