"""Dispatching over devices of several types towards a common end.

As `search/dispatch.py` does it over one type: whenever devices come free, each ready MetaOp is given what it
needs so that it and everything after it ends in time, the most urgent first. Which allocations these are, of
all that the free devices of each type have room for, the linear program's prices say: those whose devices'
time is worth least, most often some ops on one and the others on a slower one that is worth less. So a MetaOp
takes the type that it loses least on, or several at once where one is taken or too slow.

Prices alone leave open which of two MetaOps that lose alike takes which type. So a guide may say to take what
the program itself runs ops on.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, inf
from operator import le
from typing import NamedTuple

import numpy as np

from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.bound.pricing import Column, hull
from spindle_cli.plan.problem import Point, Problem
from spindle_cli.plan.search.dispatch import ALMOST, WIDEN_COST
from spindle_cli.plan.search.listing import Timed

# Of the mean price of a device, what one of a type costs at least, of which there are enough.
LEAST_PRICE = 0.02
# An allocation of the program's optimum is taken where it takes this many times as long as wanted, or less.
OPTIMUM_LATE = 1.1
# With fewer ops left to run on it, an allocation of the optimum is taken for itself no longer.
FEWEST_LEFT = 0.5
# Of so many prices it is kept what allocations are worth: those of the guides that are being changed in turn.
_PRICES_KEPT = 16


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
        mixes: whether a MetaOp may run some ops on one allocation and the others on a slower one; else it
            takes one that is fast enough.
        follows_optimum: whether a MetaOp that is in time takes an allocation on which the linear program's
            optimum runs ops, as long as some of these are left, rather than what is worth least.
        shares: by (node, number of its jobs so far), of its ops that are left, how many to run.
    """

    slack: float
    patience: float
    stretch: tuple[float, ...]
    urgency: tuple[float, ...]
    prices: tuple[float, ...]
    mixes: bool = True
    follows_optimum: bool = False
    shares: Mapping[tuple[int, int], float] = field(default_factory=dict)


class Choices:
    """The allocations of a node that some free devices have room for, by some prices.

    Attributes:
        fastest_first: the allocations, of equally fast ones the first first.
        op_s: what an op takes on each of these, ascending.
    """

    def __init__(self, fastest_first: Sequence[int], op_s: Sequence[float], cost: Sequence[float]) -> None:
        self.fastest_first = fastest_first
        self.op_s = [op_s[point] for point in fastest_first]
        self._cheapest: list[int] = []
        least = inf, -1
        for point in fastest_first:
            priced = cost[point], point
            if priced < least:
                self._cheapest.append(point)
                least = priced
        self._cheapest_s = [op_s[point] for point in self._cheapest]
        corners = hull(self._cheapest_s, [cost[point] for point in self._cheapest])
        self._corners = [self._cheapest[place] for place in corners]
        self._corners_s = [op_s[point] for point in self._corners]

    def cheapest(self, seconds: float) -> int | None:
        """What is worth least of all on which an op takes so long or less, of equals the first of the
        node's; None if it takes longer on all.
        """
        count = bisect_right(self._cheapest_s, seconds)
        return self._cheapest[count - 1] if count else None

    def mixed(self, seconds: float) -> tuple[int, float] | None:
        """What is worth least of all whose ops take so long on average, or less: some ops on one allocation,
        and the others on a slower one that is worth less. The faster allocation, and its share of the ops;
        None if an op takes longer on all.
        """
        count = bisect_right(self._corners_s, seconds)
        if not count:
            return None
        if count == len(self._corners):
            return self._corners[-1], 1.0
        faster_s, slower_s = self._corners_s[count - 1 : count + 1]
        return self._corners[count - 1], (slower_s - seconds) / (slower_s - faster_s)


# What the program runs fewer ops on is left out.
FEWEST_OPS = 0.3
# An allocation that takes more than so many times as long counts as further off, by so much for each time.
SLOWER, SLOWER_WEIGHT = 1.02, 3.0


def optimum_ops(
    points: Sequence[Point], used: Sequence[tuple[Column, float]], prices: Sequence[float]
) -> dict[int, float]:
    """By number of the allocation, how many ops run on it. The program's own may have numbers of devices that
    none of these has: each is taken for the nearest, by what the devices are worth that it has more or fewer.

    Args:
        prices: by type, of a second of a device; above 0.
    """
    counts = np.array([point.counts or () for point in points])
    op_s = np.array([point.op_s for point in points])
    num_ops: dict[int, float] = {}
    for column, ops in used:
        if ops < FEWEST_OPS:
            continue
        wanted = np.array(column.counts)
        apart = np.abs(counts - wanted) @ np.array(prices) / float(wanted @ np.array(prices))
        late = np.maximum(0.0, op_s / column.op_s - SLOWER)
        nearest = int(np.argmin(apart + SLOWER_WEIGHT * late))
        num_ops[nearest] = num_ops.get(nearest, 0.0) + ops
    return num_ops


class _Priced(NamedTuple):
    """What allocations are worth by some prices.

    Attributes:
        costs: of each node's, by what one op on it is worth.
        choices: those of a node that so many free devices of each type have room for, as far as asked for.
    """

    costs: list[list[float]]
    choices: dict[tuple[int, tuple[int, ...]], Choices]


class MixedDispatcher:
    """Dispatches one problem, forwards or (`backwards`) from its end to its start: on the graph with its
    edges turned round, and times that count from the end.

    Attributes:
        taken: of each node, devices of each type for each of its points.
        points_s: of each node, seconds of an op on each of its points.
        optimum: of each node, by point, how many of its ops the linear program runs there.
        devices: of each type, how many there are.
        num_inputs: of each node, how many others it waits for.
        consumers: of each node, those that wait for it.
    """

    def __init__(self, problem: Problem, bound: Bound, *, backwards: bool = False) -> None:
        nodes = problem.nodes
        self.problem = problem
        self.bound = bound
        self.backwards = backwards
        self.taken = [[point.counts or () for point in node.points] for node in nodes]
        self.points_s = [[point.op_s for point in node.points] for node in nodes]
        self.devices = tuple(map(problem.cluster.num_of_type.__getitem__, problem.cluster.types))
        before, behind = [node.inputs for node in nodes], [node.consumers for node in nodes]
        if backwards:
            before, behind = behind, before
        self.num_inputs, self.consumers = list(map(len, before)), behind
        self.last_first = problem.order if backwards else tuple(reversed(problem.order))
        self._fastest_first = [sorted(range(len(node_s)), key=node_s.__getitem__) for node_s in self.points_s]
        self._with_room: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        mean = float(np.mean(bound.prices)) or 1.0
        self._prices = np.maximum(np.array(bound.prices), LEAST_PRICE * mean)
        self._counts = list(map(np.array, self.taken))
        self.optimum = [
            optimum_ops(node.points, used, self._prices.tolist())
            for node, used in zip(nodes, bound.ops, strict=True)
        ]
        self._priced = lru_cache(_PRICES_KEPT)(self._price)

    def run(self, guide: MixedGuide, give_up_s: float = inf) -> tuple[list[Timed], float]:
        """The jobs in order of start, and when the last one ends; `inf` if that is after `give_up_s`."""
        return _Run(self, guide).jobs(give_up_s)

    def priced(self, guide: MixedGuide) -> _Priced:
        """By the guide's prices."""
        return self._priced(guide.prices)

    def _price(self, factors: tuple[float, ...]) -> _Priced:
        prices = self._prices * np.array(factors)
        nodes = zip(self._counts, self.points_s, strict=True)
        return _Priced([((counts @ prices) * np.array(op_s)).tolist() for counts, op_s in nodes], {})

    def choices(self, node: int, free: tuple[int, ...], priced: _Priced) -> Choices:
        """Return a node's allocations that so many free devices of each type are enough for."""
        key = node, free
        choices = priced.choices.get(key)
        if choices is None:
            room = self.with_room(node, free)
            choices = priced.choices[key] = Choices(room, self.points_s[node], priced.costs[node])
        return choices

    def with_room(self, node: int, free: tuple[int, ...]) -> list[int]:
        """A node's allocations that so many free devices of each type are enough for, the fastest first."""
        key = node, free
        points = self._with_room.get(key)
        if points is None:
            has_room = np.all(self._counts[node] <= np.array(free), axis=1).tolist()
            points = [point for point in self._fastest_first[node] if has_room[point]]
            self._with_room[key] = points
        return points


class _Grant(NamedTuple):
    """What a node is to run on.

    Attributes:
        share: of its ops that are left.
        is_enough: whether it is fast enough, not just until devices come free.
    """

    node: int
    point: int
    share: float
    is_enough: bool


class _Run:
    """A dispatch under way."""

    def __init__(self, of: MixedDispatcher, guide: MixedGuide) -> None:
        nodes = of.problem.nodes
        self.of, self.guide = of, guide
        self.priced = of.priced(guide)
        self.op_s = [seconds * by for seconds, by in zip(of.bound.op_s, guide.stretch, strict=True)]
        self.tail_s = self._tails()
        self.end_s = of.bound.lower_bound_s * (1 + guide.slack)
        self.left = [node.num_ops for node in nodes]
        self.missing = list(of.num_inputs)
        self.ready = [node for node, count in enumerate(of.num_inputs) if not count]
        self.num_jobs = [0] * len(nodes)
        self.unused = (
            [dict(node_ops) for node_ops in of.optimum] if guide.follows_optimum else [{} for _ in nodes]
        )
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
        for i in self.of.last_first:
            for j in self.of.consumers[i]:
                tail_s[i] = max(tail_s[i], tail_s[j] + self.op_s[j] * nodes[j].num_ops)
        return tail_s

    def _start(self) -> None:
        left_s = max(self.end_s - self.now_s, 1e-9 * self.end_s)
        wishes = []
        for node in self.ready:
            urgency = (self.left[node] * self.op_s[node] + self.tail_s[node]) / left_s
            wishes.append((-urgency * self.guide.urgency[node], node, self.op_s[node] / urgency * ALMOST))
        granted: list[_Grant] = []
        for _, node, wanted_s in sorted(wishes):
            chosen = self._choose(node, wanted_s, waits=bool(self.running or granted))
            if chosen is not None:
                granted.append(chosen)
                self._take(node, chosen.point, -1)
            if not any(self.free):
                break
        next_s = self.running[0][0] if self.running else None
        for grant in [self._widened(narrow) for narrow in granted]:
            self._run(grant, None if grant.is_enough else next_s)

    def _choose(self, node: int, wanted_s: float, *, waits: bool) -> _Grant | None:
        """What to run a node on; None: it waits."""
        as_in_optimum = self._as_in_optimum(node, wanted_s)
        if as_in_optimum is not None:
            return as_in_optimum
        choices = self.of.choices(node, self.free, self.priced)
        in_time = self._in_time(choices, wanted_s)
        if in_time is not None:
            return _Grant(node, *in_time, is_enough=True)
        if not choices.op_s:
            return None
        op_s, shortest_s = choices.op_s[0], self.of.points_s[node][-1]
        # What is late takes the fastest there is, even where no allocation at all would be in time.
        if waits and op_s > self.guide.patience * max(wanted_s, shortest_s):
            return None
        return _Grant(node, choices.fastest_first[0], 1.0, is_enough=op_s <= shortest_s * ALMOST)

    def _in_time(self, choices: Choices, wanted_s: float) -> tuple[int, float] | None:
        """What is fast enough and worth least, and the share of the ops to run on it."""
        if self.guide.mixes:
            return choices.mixed(wanted_s)
        cheapest = choices.cheapest(wanted_s)
        return None if cheapest is None else (cheapest, 1.0)

    def _as_in_optimum(self, node: int, wanted_s: float) -> _Grant | None:
        """What the linear program runs most of a node's ops on that are left, if that is fast enough and
        there is room.
        """
        unused = self.unused[node]
        if not unused:
            return None
        op_s, latest_s = self.of.points_s[node], OPTIMUM_LATE * wanted_s
        possible = [
            (-ops, point)
            for point, ops in unused.items()
            if op_s[point] <= latest_s and self._has_room(self.of.taken[node][point])
        ]
        if not possible:
            return None
        ops, point = min(possible)
        return _Grant(node, point, min(1.0, -ops / self.left[node]), is_enough=True)

    def _has_room(self, taken: tuple[int, ...]) -> bool:
        return all(map(le, taken, self.free))

    def _take(self, node: int, point: int, sign: int) -> None:
        """Devices of an allocation, which are then free (1) or no more (-1)."""
        taken = self.of.taken[node][point]
        self.free = tuple([free + sign * count for free, count in zip(self.free, taken, strict=True)])

    def _widened(self, grant: _Grant) -> _Grant:
        """With devices that would stay idle, where they cost little."""
        if not any(self.free):
            return grant
        node, point = grant.node, grant.point
        self._take(node, point, 1)
        choices, cost = self.of.choices(node, self.free, self.priced), self.priced.costs[node]
        widened, most = grant, WIDEN_COST * cost[point]
        for wider, op_s in zip(choices.fastest_first, choices.op_s, strict=True):
            if op_s >= self.of.points_s[node][point]:
                break
            if cost[wider] <= most:
                widened = _Grant(node, wider, 1.0, is_enough=True)
                break
        self._take(node, widened.point, -1)
        return widened

    def _run(self, grant: _Grant, until_s: float | None) -> None:
        """Start a job: the share of its ops that are left, or as many as end by `until_s`, when devices come
        free.
        """
        node, point = grant.node, grant.point
        op_s, left = self.of.points_s[node][point], self.left[node]
        share = self.guide.shares.get((node, self.num_jobs[node]), grant.share)
        ops = ceil(share * left - 1e-9)
        if until_s is not None:
            ops = min(ops, round((until_s - self.now_s) / op_s))
        ops = min(max(ops, 1), left)
        end_s = self.now_s + ops * op_s
        self.done.append(((node, point, ops), self.now_s, end_s))
        self.num_jobs[node] += 1
        self.left[node] -= ops
        self._strike(node, point, ops)
        self.ready.remove(node)
        heapq.heappush(self.running, (end_s, node, point))

    def _strike(self, node: int, point: int, ops: int) -> None:
        """Off what is left of the optimum what runs now."""
        unused = self.unused[node]
        if point in unused:
            unused[point] -= ops
            if unused[point] < FEWEST_LEFT:
                del unused[point]

    def _wait_for_next(self) -> float:
        """Move to the next end; what ends then is ready again, or lets its consumers be."""
        self.now_s = self.running[0][0]
        at_once_s = self.now_s * (1 + 1e-12)
        while self.running and self.running[0][0] <= at_once_s:
            _, node, point = heapq.heappop(self.running)
            self._take(node, point, 1)
            if self.left[node]:
                self.ready.append(node)
                continue
            for consumer in self.of.consumers[node]:
                self.missing[consumer] -= 1
                if not self.missing[consumer]:
                    self.ready.append(consumer)
        return self.now_s
