"""Drafts of `spindle` for clusters where gradient sums count: what shares parameters stays on the same
devices.

The devices are split into equal lanes, every MetaOp runs in one lane, and MetaOps are moved and exchanged
between lanes as long as that lowers

    seconds of compute of the busiest lane + w x (seconds of sums of the busiest lane + seconds of transfers)

with w below 1, as sums hide behind the backward pass in part. The searches of improve.py look at compute
alone and leave the rest to the placement, which cannot mend a schedule that spreads a component over all
devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import inf

from spindle_cli.costs.links import all_reduce_s, transfer_s
from spindle_cli.plan.placing.calendar import first_devices
from spindle_cli.plan.problem import Node, Problem
from spindle_cli.plan.schedule import Draft, UnplacedSlice, whole_slice
from spindle_cli.plan.strategies.lanes import Devices, all_or_none, best_point

LANES = (2, 3, 4, 6, 8)
WEIGHTS = (0.3, 1.0)
# More devices have nodes of several each, where the placement has choices; so many drafts would take too
# long.
MOST_DEVICES = 64
# Rounds over all MetaOps; most searches stop by themselves after three.
_LANE_ROUNDS = 8


def component_lanes(problem: Problem, longest_s: float = inf) -> Iterator[Draft]:
    """Drafts with their devices, for each number of lanes that divides the devices; none whose lanes would
    compute for more than `longest_s` even if all had as much to do.
    """
    if problem.num_devices > MOST_DEVICES:
        return
    for num_lanes in LANES:
        if problem.num_devices % num_lanes or num_lanes > problem.num_devices:
            continue
        lanes = _Lanes(problem, num_lanes)
        if not lanes.possible or sum(lanes.seconds) > num_lanes * longest_s:
            continue
        found = dict.fromkeys(lanes.assign(weight) for weight in WEIGHTS)
        for assignment in found:
            for shared_last in (True, False):
                draft = lanes.draft(assignment, shared_last=shared_last)
                if draft.end_s <= longest_s:
                    yield draft


class _Lanes:
    """A problem on lanes of equal width. A MetaOp's nodes, where it has several, are one unit."""

    def __init__(self, problem: Problem, num_lanes: int) -> None:
        self.problem = problem
        self.num_lanes = num_lanes
        self.width = problem.num_devices // num_lanes
        names = dict.fromkeys(problem.nodes[i].metaop.name for i in problem.order)
        self.unit_of_name = {name: unit for unit, name in enumerate(names)}
        points = [best_point(node, self.width) for node in problem.nodes]
        self.possible = all(point is not None for point in points)
        self.points = [point for point in points if point is not None]
        if self.possible:
            self._weigh()

    def _weigh(self) -> None:
        """Seconds, parameters and flows of every unit."""
        count = len(self.unit_of_name)
        self.seconds = [0.0] * count
        self.flows: list[tuple[int, int, float]] = []
        for node in self.problem.nodes:
            unit = self._unit(node)
            self.seconds[unit] += node.num_ops * self.points[node.index].op_s
            if node.continues is not None:
                continue
            for j in node.inputs:
                producer = self.problem.nodes[j]
                seconds = transfer_s(producer.metaop.output_bytes, self.problem.cluster.links.inter_node)
                self.flows.append((self._unit(producer), unit, 2 * seconds))
        self.shared = self._sums()

    def _sums(self) -> list[tuple[tuple[int, ...], float]]:
        """(units that use some parameters, bytes of their gradients) of all that are trained."""
        users: dict[tuple[str, int], dict[int, None]] = {}
        size: dict[tuple[str, int], int] = {}
        for (name, _), blocks in self.problem.uses.items():
            for key, number, num_bytes, *_ in blocks:
                users.setdefault((key, number), {})[self.unit_of_name[name]] = None
                size[key, number] = max(num_bytes, size.get((key, number), 0))
        together: dict[tuple[int, ...], int] = {}
        for block, units in users.items():
            together[tuple(units)] = together.get(tuple(units), 0) + size[block]
        width = self.problem.profile.gradient_bytes_per_param
        return [(units, width * num_bytes) for units, num_bytes in together.items()]

    def _unit(self, node: Node) -> int:
        return self.unit_of_name[node.metaop.name]

    def _devices(self, lane: int) -> range:
        return range(lane * self.width, (lane + 1) * self.width)

    def assign(self, weight: float) -> tuple[int, ...]:
        """The lane of each unit: the longest first to the lane with least to do, then moves and exchanges."""
        lanes = [0] * len(self.seconds)
        load = [0.0] * self.num_lanes
        for unit in sorted(range(len(lanes)), key=lambda unit: -self.seconds[unit]):
            lanes[unit] = min(range(self.num_lanes), key=lambda lane: load[lane])
            load[lanes[unit]] += self.seconds[unit]
        sum_s: dict[tuple[float, tuple[int, ...]], float] = {}
        best_s = self._cost_s(lanes, weight, sum_s)
        for _ in range(_LANE_ROUNDS):
            before_s = best_s
            for changed in self._neighbours(lanes):
                cost_s = self._cost_s(changed, weight, sum_s)
                if cost_s < best_s * (1 - 1e-9):
                    lanes[:], best_s = changed, cost_s
            if best_s == before_s:
                break
        return tuple(lanes)

    def _neighbours(self, lanes: list[int]) -> Iterator[list[int]]:
        """`lanes`, as it is when each is asked for, with one unit moved, all users of some parameters moved,
        or two units exchanged.
        """
        bundles: list[tuple[int, ...]] = [(unit,) for unit in range(len(lanes))]
        bundles += [users for users, _ in self.shared if len(users) > 1]
        for bundle in bundles:
            for lane in range(self.num_lanes):
                yield [lane if unit in bundle else old for unit, old in enumerate(lanes)]
        for a, b in combinations(range(len(lanes)), 2):
            if lanes[a] != lanes[b]:
                changed = list(lanes)
                changed[a], changed[b] = lanes[b], lanes[a]
                yield changed

    def _cost_s(
        self, lanes: Sequence[int], weight: float, sum_s: dict[tuple[float, tuple[int, ...]], float]
    ) -> float:
        """What `assign` lowers; `sum_s` remembers what sums take."""
        load, sums = [0.0] * self.num_lanes, [0.0] * self.num_lanes
        for unit, lane in enumerate(lanes):
            load[lane] += self.seconds[unit]
        for users, num_bytes in self.shared:
            members = tuple(sorted({lanes[unit] for unit in users}))
            key = (num_bytes, members)
            if key not in sum_s:
                devices = [device for lane in members for device in self._devices(lane)]
                sum_s[key] = all_reduce_s(num_bytes, devices, self.problem.cluster)
            for lane in members:
                sums[lane] += sum_s[key]
        moved_s = sum(seconds for a, b, seconds in self.flows if lanes[a] != lanes[b])
        return max(load) + weight * (max(sums) + moved_s)

    def draft(self, lanes: Sequence[int], *, shared_last: bool) -> Draft:
        """Every lane runs what is ready, one after another: of equals what leads to the longest way to go.
        They come in the order of their starts, as what starts first is always the next.

        `shared_last`: what is shared with other lanes comes as late as it can, as what runs forward last
        runs backward first, and its sum then has the whole backward pass to hide behind.
        """
        nodes = self.problem.nodes
        to_go = self._to_go()
        crosses = {unit for users, _ in self.shared if len({lanes[u] for u in users}) > 1 for unit in users}
        free_s, end_s = [0.0] * self.num_lanes, [0.0] * len(nodes)
        placed: list[tuple[UnplacedSlice, Devices | None]] = []
        left = set(range(len(nodes)))
        while left:
            ready = [i for i in left if not left.intersection(nodes[i].inputs)]

            def rank(i: int) -> tuple[float, bool, float, int]:
                node = nodes[i]
                lane = lanes[self._unit(node)]
                start_s = max([free_s[lane], *(end_s[j] for j in node.inputs)])
                return start_s, shared_last and self._unit(node) in crosses, -to_go[i], i

            i = min(ready, key=rank)
            start_s, lane, point = rank(i)[0], lanes[self._unit(nodes[i])], self.points[i]
            end_s[i] = free_s[lane] = start_s + nodes[i].num_ops * point.op_s
            left.remove(i)
            devices = first_devices(self.problem.cluster, point, self._devices(lane))
            placed.append((whole_slice(nodes[i], point, start_s, end_s[i]), devices))
        pieces, of_pieces = zip(*placed, strict=True)
        return Draft("spindle", pieces, all_or_none(of_pieces))

    def _to_go(self) -> list[float]:
        """Seconds from the start of each node to the end of the longest chain from it."""
        to_go = [0.0] * len(self.problem.nodes)
        for i in reversed(self.problem.order):
            node = self.problem.nodes[i]
            after_s = max((to_go[j] for j in node.consumers), default=0.0)
            to_go[i] = node.num_ops * self.points[i].op_s + after_s
        return to_go
