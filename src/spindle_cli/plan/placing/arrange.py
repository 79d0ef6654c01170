"""Arranging: exchanging devices between nodes in a placed schedule, so that sums and transfers stay inside.

Which device does what is settled by the placement; any renumbering of the devices keeps the schedule. Sums
are fast over whole nodes and slow over a few devices of each, so pairs of devices of different nodes are
exchanged as long as that lowers

    seconds of sums of the busiest device, and of the average one, and what transfers take longer between
    nodes

Devices that are in a tensor-parallel group together go together, and stay on one node.

Deterministic: the pairs come from a fixed seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import mul
from random import Random

from spindle_cli.account.traffic import Traffic, traffic_of
from spindle_cli.costs.links import Spread, spread_all_reduce_s, transfer_s
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import placed_slices
from spindle_cli.plan.types import Slice


def arrange(
    problem: Problem, slices: tuple[Slice, ...], num_exchanges: int
) -> tuple[tuple[Slice, ...], Sequence[int]]:
    """Exchange devices of a schedule between nodes, in so many tries; gives the schedule, and for each device
    the one whose place it takes.
    """
    if len(problem.cluster.node_sizes) == 1:
        return slices, range(problem.num_devices)
    arrangement = _Arrangement(problem, slices)
    random = Random(0)  # noqa: S311 - reproducible, not secret
    for number in range(num_exchanges):
        a, b = random.randrange(problem.num_devices), random.randrange(problem.num_devices)
        if arrangement.may_be_exchanged(a, b):
            arrangement.try_exchange(arrangement.all_alike(a, b) if number % 2 else arrangement.alone(a, b))
    place = arrangement.place
    arranged = tuple(
        slice_.model_copy(update={"devices": tuple(place[device] for device in slice_.devices)})
        for slice_ in slices
    )
    return arranged, place


class _Arrangement:
    """Where each device of a placement goes (`place`), on which node that is (`lies_on`), and what it costs.

    Devices that take part in the same sums are of one kind.
    """

    def __init__(self, problem: Problem, slices: tuple[Slice, ...]) -> None:
        traffic = traffic_of(placed_slices(problem, slices), problem.uses)
        self.cluster = problem.cluster
        self.node_of = problem.cluster.node_of
        self.place = list(range(problem.num_devices))
        self.lies_on = list(self.node_of)
        self.on_node: list[list[int]] = [[] for _ in problem.cluster.node_sizes]
        for device, node in enumerate(self.node_of):
            self.on_node[node].append(device)
        self.unit_of = bound_together(slices, problem.num_devices)
        self._make_groups(traffic)
        self._make_kinds()
        self._make_neighbours(traffic)
        self._differences: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def _make_groups(self, traffic: Traffic) -> None:
        """Sets of devices that sum gradients together, how they spread over the nodes, and what they cost."""
        num_bytes: dict[tuple[int, ...], int] = {}
        for summed in traffic.sums:
            num_bytes[summed.devices] = num_bytes.get(summed.devices, 0) + summed.num_bytes
        self.groups_of: list[list[int]] = [[] for _ in self.place]
        self.spread = [[0] * len(self.cluster.node_sizes) for _ in num_bytes]
        for group, devices in enumerate(num_bytes):
            for device in devices:
                self.groups_of[device].append(group)
                self.spread[group][self.node_of[device]] += 1
        self.num_bytes = list(num_bytes.values())
        most = max(self.cluster.node_sizes)
        self.histogram = [_histogram(spread, most) for spread in self.spread]
        self._known_s: dict[tuple[int, tuple[int, ...], tuple[int, ...]], float] = {}
        self.sum_s = [self._group_s(group) for group in range(len(num_bytes))]

    def _make_kinds(self) -> None:
        """The kinds of devices, by the groups that they are in, and what the sums of each cost."""
        kinds = Counter(map(tuple, self.groups_of))
        self.groups_of_kind = list(kinds)
        self.size_of_kind = list(kinds.values())
        number = {groups: kind for kind, groups in enumerate(kinds)}
        self.kind_of = [number[tuple(groups)] for groups in self.groups_of]
        self.kinds_with = [
            [k for k, groups in enumerate(kinds) if g in groups] for g in range(len(self.num_bytes))
        ]
        self.kind_s = [sum(self.sum_s[group] for group in groups) for groups in kinds]
        self.cost_s = self._cost_s(self.kind_s)

    def _make_neighbours(self, traffic: Traffic) -> None:
        """For each device, whom it exchanges tensors with, and how much longer that takes between nodes."""
        links = self.cluster.links
        longer_s: dict[tuple[int, int], float] = {}
        for exchange in (*traffic.activations, *traffic.gradients):
            for sender, taker, num_bytes in exchange.messages:
                between, inside = self.cluster.link(sender, taker), links.intra_node
                if self.on_one_node(sender, taker):
                    between = links.inter_node
                extra_s = transfer_s(num_bytes, between) - transfer_s(num_bytes, inside)
                pair = (min(sender, taker), max(sender, taker))
                # Of one device on average.
                longer_s[pair] = longer_s.get(pair, 0.0) + extra_s / len(self.place)
        self.neighbours: list[list[tuple[int, float]]] = [[] for _ in self.place]
        for (a, b), seconds in longer_s.items():
            self.neighbours[a].append((b, seconds))
            self.neighbours[b].append((a, seconds))

    def may_be_exchanged(self, a: int, b: int) -> bool:
        """Whether two devices are of one type and lie on two nodes."""
        type_of, place = self.cluster.type_of, self.place
        return not self.on_one_node(a, b) and type_of[place[a]] == type_of[place[b]]

    def on_one_node(self, a: int, b: int) -> bool:
        """Whether two devices lie on the same node as things stand."""
        return self.lies_on[a] == self.lies_on[b]

    def alone(self, a: int, b: int) -> list[tuple[int, int]]:
        """Pairs of a's unit and b's, if they are of one size."""
        of_a, of_b = self.unit_of[a], self.unit_of[b]
        return list(zip(of_a, of_b, strict=True)) if len(of_a) == len(of_b) else []

    def all_alike(self, a: int, b: int) -> list[tuple[int, int]]:
        """Pairs of all units on a's node like a's, and on b's like b's: moving half of a sum would be
        worse.
        """
        if len(self.unit_of[a]) != len(self.unit_of[b]):
            return []
        of_a, of_b = self._alike(a), self._alike(b)
        return list(zip(of_a, of_b, strict=False))

    def _alike(self, device: int) -> list[int]:
        """Unit by unit, the devices on the device's node whose units have the same kinds as its own."""
        kinds = self._kinds(device)
        here = self.on_node[self.lies_on[device]]
        if len(kinds) == 1:
            return [d for d in here if self.kind_of[d] == kinds[0] and len(self.unit_of[d]) == 1]
        units = dict.fromkeys(self.unit_of[d] for d in here)
        return [d for unit in units if self._kinds(unit[0]) == kinds for d in unit]

    def _kinds(self, device: int) -> tuple[int, ...]:
        return tuple(self.kind_of[d] for d in self.unit_of[device])

    def try_exchange(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Exchange the places of some pairs of devices, on the same two nodes, if that costs less."""
        if not pairs:
            return
        has_neighbours = any(self.neighbours[device] for device in chain.from_iterable(pairs))
        moves = self._moves(pairs)
        if not (has_neighbours or moves):
            return  # that changes no sum and no message
        node_a, node_b = self.lies_on[pairs[0][0]], self.lies_on[pairs[0][1]]
        changed_s = self._changed_s(moves, node_a, node_b)
        kind_s, cost_s = self.kind_s, self.cost_s
        if moves:
            kind_s = list(self.kind_s)
            for group, group_s in changed_s.items():
                for kind in self.kinds_with[group]:
                    kind_s[kind] += group_s - self.sum_s[group]
            cost_s = self._cost_s(kind_s)
        before_s = after_s = 0.0
        if has_neighbours:
            before_s, after_s = self._between_s(pairs, node_a, node_b)
        if cost_s + after_s < self.cost_s + before_s - 1e-9 * self.cost_s:
            self.kind_s, self.cost_s = kind_s, cost_s
            for group, group_s in changed_s.items():
                self.sum_s[group] = group_s
                self._move(group, node_a, node_b, moves[group])
            self._swap(pairs, node_a, node_b)

    def _changed_s(self, moves: Mapping[int, int], node_a: int, node_b: int) -> dict[int, float]:
        """Seconds of the sums of groups, if so many devices of each went from one node to another."""
        changed_s: dict[int, float] = {}
        for group, count in moves.items():
            self._move(group, node_a, node_b, count)
            changed_s[group] = self._group_s(group)
            self._move(group, node_b, node_a, count)
        return changed_s

    def _moves(self, pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
        """How many devices more of each group an exchange brings from the node of each pair's first device to
        that of its second; groups that it leaves as they are are left out.
        """
        kind_of = self.kind_of
        more: dict[int, int] = {}
        for (a, b), count in Counter((kind_of[a], kind_of[b]) for a, b in pairs).items():
            if a != b:
                only_a, only_b = self._only(a, b)
                for group in only_a:
                    more[group] = more.get(group, 0) + count
                for group in only_b:
                    more[group] = more.get(group, 0) - count
        return {group: count for group, count in more.items() if count}

    def _swap(self, pairs: Sequence[tuple[int, int]], node_a: int, node_b: int) -> None:
        place, on_a, on_b = self.place, self.on_node[node_a], self.on_node[node_b]
        for a, b in pairs:
            place[a], place[b] = place[b], place[a]
            on_a[on_a.index(a)] = b
            on_b[on_b.index(b)] = a
            self.lies_on[a], self.lies_on[b] = node_b, node_a

    def _only(self, a: int, b: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Groups of kind a that kind b has no part in, and the other way round."""
        if (a, b) not in self._differences:
            of_a, of_b = self.groups_of_kind[a], self.groups_of_kind[b]
            self._differences[a, b] = (
                tuple(group for group in of_a if group not in of_b),
                tuple(group for group in of_b if group not in of_a),
            )
        return self._differences[a, b]

    def _move(self, group: int, source: int, destination: int, count: int) -> None:
        """Count so many devices of a group as on another node."""
        spread, histogram = self.spread[group], self.histogram[group]
        histogram[spread[source]] -= 1
        histogram[spread[destination]] -= 1
        spread[source] -= count
        spread[destination] += count
        histogram[spread[source]] += 1
        histogram[spread[destination]] += 1

    def _group_s(self, group: int) -> float:
        histogram = self.histogram[group]
        nodes: tuple[int, ...] = ()
        if not self.cluster.has_one_kind_of_nodes:
            nodes = tuple(node for node, count in enumerate(self.spread[group]) if count)
        key = (group, tuple(histogram), nodes)
        if key not in self._known_s:
            counts = (count for count, number in enumerate(histogram) for _ in range(number) if count)
            spread = Spread(tuple(counts), nodes)
            self._known_s[key] = spread_all_reduce_s(self.num_bytes[group], spread, self.cluster)
        return self._known_s[key]

    def _cost_s(self, kind_s: Sequence[float]) -> float:
        """Seconds of sums of the busiest device and of the average one."""
        total_s: float = sum(map(mul, kind_s, self.size_of_kind))
        return max(kind_s) + total_s / len(self.place)

    def _between_s(self, pairs: Sequence[tuple[int, int]], node_a: int, node_b: int) -> tuple[float, float]:
        """Seconds that what these devices exchange with others takes longer for crossing nodes: as they are,
        and with each pair, of which the first is on one node and the second on another, exchanged.
        """
        lies_on, neighbours = self.lies_on, self.neighbours
        goes_to: dict[int, int] = {}
        for a, b in pairs:
            goes_to[a], goes_to[b] = node_b, node_a
        before_s = after_s = 0.0
        for device, then in goes_to.items():
            now = lies_on[device]
            for neighbour, seconds in neighbours[device]:
                is_on = lies_on[neighbour]
                if is_on != now:
                    before_s += seconds
                if goes_to.get(neighbour, is_on) != then:
                    after_s += seconds
        return before_s, after_s


def _histogram(spread: Sequence[int], most: int) -> list[int]:
    """How many nodes have 0, 1, ... `most` of a group's devices: what the seconds of its sum depend on."""
    histogram = [0] * (most + 1)
    for count in spread:
        histogram[count] += 1
    return histogram


def bound_together(slices: Sequence[Slice], num_devices: int) -> list[tuple[int, ...]]:
    """For each device, the devices that may not be parted from it, ascending: those that it shares a
    tensor-parallel group with, and those that these share one with.
    """
    unit_of: list[tuple[int, ...]] = [(device,) for device in range(num_devices)]
    for slice_ in slices:
        for first in range(0, len(slice_.devices) if slice_.tp > 1 else 0, slice_.tp):
            members = slice_.devices[first : first + slice_.tp]
            if any(unit_of[device] != unit_of[members[0]] for device in members):
                joined = tuple(sorted({member for device in members for member in unit_of[device]}))
                for device in joined:
                    unit_of[device] = joined
    return unit_of
