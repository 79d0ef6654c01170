"""Dispatching over devices of several types towards a common end.

As `search/dispatch.py` does it over one type: whenever devices come free, each ready MetaOp is given what it
needs so that it and everything after it ends in time, the most urgent first. Which allocation that is, of
all that are fast enough and that the free devices of each type have room for, the linear program's prices
say: the one whose devices' time is worth least. So a MetaOp takes the type that it loses least on, or
several at once where one is taken or too slow.
"""

from __future__ import annotations

import heapq
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


class MixedDispatcher:
    """Dispatches one problem.

    Attributes:
        counts: of each node, devices of each type for each of its points; `of_type`: type by type, `taken`:
            point by point.
        points_s: of each node, seconds of an op on each of its points.
        devices: of each type, how many there are.
    """

    def __init__(self, problem: Problem, bound: MixedBound) -> None:
        self.problem = problem
        self.bound = bound
        self.counts = [np.array([point.counts for point in node.points]) for node in problem.nodes]
        self.points_s = [np.array([point.op_s for point in node.points]) for node in problem.nodes]
        self.of_type = [[np.ascontiguousarray(column) for column in own.T] for own in self.counts]
        self.taken = [[point.counts or () for point in node.points] for node in problem.nodes]
        self.devices = [problem.cluster.num_of_type[kind] for kind in problem.cluster.types]
        self._known_costs: tuple[tuple[float, ...], list[np.ndarray]] | None = None
        mean = float(np.mean(bound.prices)) or 1.0
        self._prices = np.maximum(np.array(bound.prices), LEAST_PRICE * mean)

    def run(self, guide: MixedGuide, give_up_s: float = inf) -> tuple[list[Timed], float]:
        """The jobs in order of start, and when the last one ends; `inf` if that is after `give_up_s`."""
        return _Run(self, guide).jobs(give_up_s)

    def costs(self, guide: MixedGuide) -> list[np.ndarray]:
        """Of each node's allocations, what one op on it is worth."""
        if self._known_costs is None or self._known_costs[0] != guide.prices:
            prices = self._prices * np.array(guide.prices)
            each = zip(self.counts, self.points_s, strict=True)
            self._known_costs = guide.prices, [(counts @ prices) * op_s for counts, op_s in each]
        return self._known_costs[1]

    def has_room(self, node: int, free: Sequence[int]) -> np.ndarray:
        """Of each of a node's allocations, whether so many free devices of each type are enough."""
        first, *others = zip(self.of_type[node], free, strict=True)
        mask: np.ndarray = first[0] <= first[1]
        for counts, most in others:
            mask &= counts <= most
        return mask


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
        self.free = list(of.devices)
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
        op_s = self.of.points_s[node]
        has_room = self.of.has_room(node, self.free)
        enough = np.where(has_room & (op_s <= wanted_s), self.cost[node], inf)
        cheapest = int(enough.argmin())
        if enough[cheapest] < inf:
            return cheapest, True
        within = np.where(has_room, op_s, inf)
        fastest = int(within.argmin())
        if within[fastest] == inf:
            return None
        # What is late takes the fastest there is, even where no allocation at all would be in time.
        if waits and op_s[fastest] > self.guide.patience * max(wanted_s, float(op_s[-1])):
            return None
        return fastest, bool(op_s[fastest] <= op_s[-1] * _ALMOST)

    def _take(self, node: int, point: int, sign: int) -> None:
        """Devices of an allocation, which are then free (1) or no more (-1)."""
        self.free = [
            free + sign * count for free, count in zip(self.free, self.of.taken[node][point], strict=True)
        ]

    def _widened(self, node: int, point: int, is_enough: bool) -> tuple[int, int, bool]:
        """With devices that would stay idle, where they cost little."""
        if not any(self.free):
            return node, point, is_enough
        self._take(node, point, 1)
        op_s, cost = self.of.points_s[node], self.cost[node]
        wider = self.of.has_room(node, self.free) & (op_s < op_s[point])
        wider &= cost <= WIDEN_COST * cost[point]
        within = np.where(wider, op_s, inf)
        best = int(within.argmin())
        found = (node, point, is_enough) if within[best] == inf else (node, best, True)
        self._take(node, found[1], -1)
        return found

    def _run(self, node: int, point: int, until_s: float | None) -> None:
        """Start a job: all ops that are left, or as many as end by `until_s`, when devices come free."""
        op_s, left = float(self.of.points_s[node][point]), self.left[node]
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
