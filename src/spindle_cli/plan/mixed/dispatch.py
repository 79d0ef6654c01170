"""Dispatching over devices of several types towards a common end.

As `search/dispatch.py` does it over one type: whenever devices come free, each ready MetaOp is given what it
needs so that it and everything after it ends in time, the most urgent first. Which allocation that is, of
all that are fast enough and that the free devices of each type have room for, the linear program's prices
say: the one whose devices' time is worth least. So a MetaOp takes the type that it loses least on, or
several at once where one is taken or too slow.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

import numpy as np

from spindle_cli.plan.mixed.bound import MixedBound
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.listing import Timed

# Widening may cost this many times as much per op: the devices would be idle otherwise.
WIDEN_COST = 1.5
# Of the mean price of a device, what one of a type costs at least, of which there are enough.
LEAST_PRICE = 0.02
_ALMOST = 1 + 1e-9


@dataclass(frozen=True)
class MixedGuide:
    """What steers a dispatch.

    Attributes:
        slack: the target end is the lower bound times 1 + slack.
        patience: a MetaOp that finds no room for an allocation that is fast enough takes one that takes up to
            so many times as long, and else waits.
        stretch: for each node, multiplies its seconds in the linear program.
        urgency: for each node, multiplies its urgency.
        prices: by type, multiplies its price.
        shares: by (node, number of its jobs so far), of its ops that are left, how many to run.
    """

    slack: float
    patience: float
    stretch: tuple[float, ...]
    urgency: tuple[float, ...]
    prices: tuple[float, ...]
    shares: Mapping[tuple[int, int], float] = field(default_factory=dict)


class _Choices:
    """Of a node's allocations those that some free devices have room for, by some prices.

    Attributes:
        fastest_first: the allocations, of equally fast ones the first first.
        op_s: what an op takes on each of these, ascending.
        cheapest: of the first so many of these, the one whose devices' time is worth least, of equals the
            first of the node's.
    """

    def __init__(self, fastest_first: Sequence[int], op_s: Sequence[float], cost: Sequence[float]) -> None:
        self.fastest_first = fastest_first
        self.op_s = [op_s[point] for point in fastest_first]
        self.cheapest: list[int] = []
        for point in fastest_first:
            best = self.cheapest[-1] if self.cheapest else point
            self.cheapest.append(point if (cost[point], point) < (cost[best], best) else best)

    def cheapest_within(self, seconds: float) -> int | None:
        """Of those on which an op takes at most so long; None if it takes longer on all."""
        count = bisect_right(self.op_s, seconds)
        return self.cheapest[count - 1] if count else None


class MixedDispatcher:
    """Dispatches one problem.

    Attributes:
        taken: of each node, devices of each type for each of its points.
        points_s: of each node, seconds of an op on each of its points.
        devices: of each type, how many there are.
    """

    def __init__(self, problem: Problem, bound: MixedBound) -> None:
        self.problem = problem
        self.bound = bound
        self.taken = [[point.counts or () for point in node.points] for node in problem.nodes]
        self.points_s = [[point.op_s for point in node.points] for node in problem.nodes]
        self.devices = tuple(problem.cluster.num_of_type[kind] for kind in problem.cluster.types)
        self._fastest_first = [sorted(range(len(own)), key=own.__getitem__) for own in self.points_s]
        self._with_room: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self._known_costs: tuple[tuple[float, ...], list[list[float]]] | None = None
        self._known_choices: dict[tuple[int, tuple[int, ...]], _Choices] = {}
        mean = float(np.mean(bound.prices)) or 1.0
        self._prices = np.maximum(np.array(bound.prices), LEAST_PRICE * mean)
        self._counts = [np.array(own) for own in self.taken]

    def run(self, guide: MixedGuide, give_up_s: float = inf) -> tuple[list[Timed], float]:
        """The jobs in order of start, and when the last one ends; `inf` if that is after `give_up_s`."""
        return _Run(self, guide).jobs(give_up_s)

    def costs(self, guide: MixedGuide) -> list[list[float]]:
        """Of each node's allocations, what one op on it is worth."""
        if self._known_costs is None or self._known_costs[0] != guide.prices:
            prices = self._prices * np.array(guide.prices)
            each = zip(self._counts, self.points_s, strict=True)
            costs = [((counts @ prices) * np.array(op_s)).tolist() for counts, op_s in each]
            self._known_costs, self._known_choices = (guide.prices, costs), {}
        return self._known_costs[1]

    def choices(self, node: int, free: tuple[int, ...]) -> _Choices:
        """Of a node, those that so many free devices of each type are enough for, by the prices of which
        costs were last asked for.
        """
        key = node, free
        found = self._known_choices.get(key)
        if found is None:
            assert self._known_costs is not None, "a run asks for costs first"
            points_s, cost = self.points_s[node], self._known_costs[1][node]
            found = self._known_choices[key] = _Choices(self.with_room(node, free), points_s, cost)
        return found

    def with_room(self, node: int, free: tuple[int, ...]) -> list[int]:
        """A node's allocations that so many free devices of each type are enough for, the fastest first."""
        key = node, free
        found = self._with_room.get(key)
        if found is None:
            has_room = np.all(self._counts[node] <= np.array(free), axis=1).tolist()
            found = [point for point in self._fastest_first[node] if has_room[point]]
            self._with_room[key] = found
        return found


class _Run:
    """A dispatch under way."""

    def __init__(self, of: MixedDispatcher, guide: MixedGuide) -> None:
        nodes = of.problem.nodes
        self.of, self.guide = of, guide
        self.cost = of.costs(guide)
        self.op_s = [seconds * by for seconds, by in zip(of.bound.op_s, guide.stretch, strict=True)]
        self.tail_s = self._tails()
        self.end_s = of.bound.lower_bound_s * (1 + guide.slack)
        self.left = [node.num_ops for node in nodes]
        self.missing = [len(node.inputs) for node in nodes]
        self.ready = [node.index for node in nodes if not node.inputs]
        self.num_jobs = [0] * len(nodes)
        self.free = of.devices
        self.running: list[tuple[float, int, int]] = []  # heap of (end, node, point)
        self.now_s = 0.0
        self.done: list[Timed] = []

    def jobs(self, give_up_s: float) -> tuple[list[Timed], float]:
        while self.ready or self.running:
            if self.ready and any(self.free):
                self._start()
            if not self.running:
                break
            if self._wait_for_next() > give_up_s:
                return self.done, inf
        return self.done, self.now_s

    def _tails(self) -> list[float]:
        """For each node, the seconds of the longest chain after it."""
        tail_s = [0.0] * len(self.op_s)
        nodes = self.of.problem.nodes
        for i in reversed(self.of.problem.order):
            for j in nodes[i].consumers:
                tail_s[i] = max(tail_s[i], tail_s[j] + self.op_s[j] * nodes[j].num_ops)
        return tail_s

    def _start(self) -> None:
        left_s = max(self.end_s - self.now_s, 1e-9 * self.end_s)
        wishes = []
        for node in self.ready:
            urgency = (self.left[node] * self.op_s[node] + self.tail_s[node]) / left_s
            wishes.append((-urgency * self.guide.urgency[node], node, self.op_s[node] / urgency * _ALMOST))
        granted: list[tuple[int, int, bool]] = []
        for _, node, wanted_s in sorted(wishes):
            found = self._choose(node, wanted_s, waits=bool(self.running or granted))
            if found is not None:
                granted.append((node, *found))
                self._take(node, found[0], -1)
            if not any(self.free):
                break
        next_s = self.running[0][0] if self.running else None
        for node, point, is_enough in [self._widened(*each) for each in granted]:
            self._run(node, point, None if is_enough else next_s)

    def _choose(self, node: int, wanted_s: float, *, waits: bool) -> tuple[int, bool] | None:
        """The point to take, and whether it is fast enough."""
        choices = self.of.choices(node, self.free)
        cheapest = choices.cheapest_within(wanted_s)
        if cheapest is not None:
            return cheapest, True
        if not choices.op_s:
            return None
        op_s, shortest_s = choices.op_s[0], self.of.points_s[node][-1]
        # What is late takes the fastest there is, even where no allocation at all would be in time.
        if waits and op_s > self.guide.patience * max(wanted_s, shortest_s):
            return None
        return choices.fastest_first[0], op_s <= shortest_s * _ALMOST

    def _take(self, node: int, point: int, sign: int) -> None:
        """Devices of an allocation, which are then free (1) or no more (-1)."""
        taken = self.of.taken[node][point]
        self.free = tuple([free + sign * count for free, count in zip(self.free, taken, strict=True)])

    def _widened(self, node: int, point: int, is_enough: bool) -> tuple[int, int, bool]:
        """With devices that would stay idle, where they cost little."""
        if not any(self.free):
            return node, point, is_enough
        self._take(node, point, 1)
        choices, cost = self.of.choices(node, self.free), self.cost[node]
        found, most = (node, point, is_enough), WIDEN_COST * cost[point]
        for wider, op_s in zip(choices.fastest_first, choices.op_s, strict=True):
            if op_s >= self.of.points_s[node][point]:
                break
            if cost[wider] <= most:
                found = node, wider, True
                break
        self._take(node, found[1], -1)
        return found

    def _run(self, node: int, point: int, until_s: float | None) -> None:
        """Start a job: all ops that are left, or as many as end by `until_s`, when devices come free."""
        op_s, left = self.of.points_s[node][point], self.left[node]
        share = self.guide.shares.get((node, self.num_jobs[node]), 1.0)
        ops = ceil(share * left - 1e-9)
        if until_s is not None:
            ops = min(ops, round((until_s - self.now_s) / op_s))
        ops = min(max(ops, 1), left)
        end_s = self.now_s + ops * op_s
        self.done.append(((node, point, ops), self.now_s, end_s))
        self.num_jobs[node] += 1
        self.left[node] -= ops
        self.ready.remove(node)
        heapq.heappush(self.running, (end_s, node, point))

    def _wait_for_next(self) -> float:
        """Move to the next end; what ends then is ready again, or lets its consumers be."""
        nodes = self.of.problem.nodes
        self.now_s = self.running[0][0]
        at_once_s = self.now_s * (1 + 1e-12)
        while self.running and self.running[0][0] <= at_once_s:
            _, node, point = heapq.heappop(self.running)
            self._take(node, point, 1)
            if self.left[node]:
                self.ready.append(node)
                continue
            for consumer in nodes[node].consumers:
                self.missing[consumer] -= 1
                if not self.missing[consumer]:
                    self.ready.append(consumer)
        return self.now_s
