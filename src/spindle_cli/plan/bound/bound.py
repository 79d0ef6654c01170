"""A lower bound on every schedule of whole batches, and the allocations that it rests on, on devices of one
type or several: the program of `program.py`, with a row for each type of device.

An op of m on allocation a, n_k devices of type k for T seconds, uses

    end[m], edge[m,j]   T: m runs in sequence, producers first (m without consumers before the end)
    devices[k]          n_k T: the device-seconds of all ops fit on N_k devices until the end

On one type allocations are those of the problem: equal shares. On several they are batches cut in any way,
of which there are too many to list (`pricing.py`); what runs on all devices that share out its parameters
has these alone, in its best cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spindle_cli.costs.parameters import level_of
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.bound.pricing import Column, Listed, Offer, column_of, hull, pricings
from spindle_cli.plan.bound.program import Array, Row, bounded, chain_rows, device_rows, proven
from spindle_cli.plan.problem import MemoryFallback, Node, Point, Problem
from spindle_cli.profile.types import MetaOpProfile

# Ops of an optimum that are fewer are none.
NO_OPS = 1e-7


@dataclass(frozen=True)
class Bound:
    """The program's optimum, and what its prices prove.

    Attributes:
        lower_bound_s: no schedule ends earlier.
        ops: for each node, its allocations with how many ops run on them, of those that any do.
        start_s: start of each node in the optimum.
        device_value_s: by type, seconds by which the bound falls per device added.
        prices: by type, of a second of one of its devices, in seconds of the bound.
        critical: for each node, seconds of bound per second added to it.
        row_prices: of every row of the program.
    """

    lower_bound_s: float
    ops: tuple[tuple[tuple[Column, float], ...], ...]
    start_s: tuple[float, ...]
    device_value_s: Mapping[str, float]
    prices: tuple[float, ...]
    critical: tuple[float, ...]
    row_prices: Mapping[str, float]

    @cached_property
    def op_s(self) -> tuple[float, ...]:
        """Return the seconds that an op of each node takes in the optimum, on average."""
        return tuple(
            sum(column.op_s * ops for column, ops in allocations) / sum(ops for _, ops in allocations)
            for allocations in self.ops
        )


def lower_bound(problem: Problem) -> Bound:
    """Solve the program of this module. Deterministic.

    Raises:
        SolverError: the solver failed (never for a valid problem).
    """
    nodes, unit_s = problem.nodes, problem.serial_s
    choices, rows = _program(problem, problem.fallback)
    solution = bounded(choices, rows)
    prices = tuple(solution.prices[name] for name in device_rows(problem.devices_of_types))
    return Bound(
        lower_bound_s=solution.at_least * unit_s,
        ops=tuple(
            tuple((column, ops) for column, ops in allocations if ops > NO_OPS)
            for allocations in solution.ops
        ),
        start_s=tuple(solution.levels[f"start_{node.index}"] * unit_s for node in nodes),
        device_value_s={
            kind: price * solution.optimum * unit_s
            for kind, price in zip(problem.cluster.num_of_type, prices, strict=True)
        },
        prices=prices,
        critical=tuple(sum(solution.prices[name] for name in choice.chain) for choice in choices),
        row_prices=solution.prices,
    )


def lower_bound_under(problem: Problem, bound: Bound, split: MemoryFallback) -> float:
    """Seconds that no schedule of a problem on several types, with nothing given up, is shorter than once its
    MetaOps are split so, by the prices of the problem as it is: the program's are no lower.
    """
    at_least, _ = proven(*_program(problem, split), bound.row_prices)
    return at_least * problem.serial_s


def cheapest_columns(problem: Problem, bound: Bound) -> list[Column]:
    """Return each node's allocation that costs least by the bound's prices: none that a plan has of whole
    batches costs less.
    """
    return proven(*_program(problem, problem.fallback), bound.row_prices)[1]


@dataclass(frozen=True, eq=False)
class _Run:
    """A node of the program, as `Choice` says.

    Attributes:
        chain: rows of what comes behind it.
        devices: rows of the types.
        offers: what its allocations are among.
    """

    num_ops: int
    chain: tuple[str, ...]
    devices: tuple[str, ...]
    first: tuple[Column, ...]
    offers: Sequence[Offer]
    unit_s: float

    @property
    def rows(self) -> tuple[str, ...]:
        return self.chain + self.devices

    def uses(self, allocation: Column) -> Array:
        op_s, counts = allocation
        chain_uses = [op_s / self.unit_s] * len(self.chain)
        return np.array(chain_uses + [count * op_s / self.unit_s for count in counts])

    def cheapest(self, prices: Array) -> Column:
        critical, of_types = float(prices[: len(self.chain)].sum()), prices[len(self.chain) :].tolist()
        offered = [offer.cheapest(of_types, critical) for offer in self.offers]
        columns = [column for column in offered if column is not None]
        return min(columns, key=lambda column: column.cost(of_types, critical))


def _program(problem: Problem, split: MemoryFallback) -> tuple[list[_Run], dict[str, Row]]:
    """Its nodes and rows. `split`: which MetaOps are."""
    chains = chain_rows([node.consumers for node in problem.nodes])
    devices = device_rows(problem.devices_of_types)
    choices = [
        _Run(
            num_ops=node.num_ops,
            chain=tuple(chain),
            devices=tuple(devices),
            first=_first(node, problem.cluster),
            offers=_offers(node, problem, split),
            unit_s=problem.serial_s,
        )
        for node, chain in zip(problem.nodes, chains, strict=True)
    ]
    return choices, {name: row for rows in chains for name, row in rows.items()} | devices


def _first(node: Node, cluster: Cluster) -> tuple[Column, ...]:
    """The allocations that the program begins with: the fastest, so that it always can be solved; and the
    first, or on one type all that an optimum may have.
    """
    if cluster.is_mixed:
        return column_of(node.points[0]), column_of(node.points[-1])
    columns = [column_of(point) for point in reversed(node.points)]
    corners = hull([column.op_s for column in columns], [column.device_s for column in columns])
    return tuple(columns[place] for place in reversed(corners))


def _offers(node: Node, problem: Problem, split: MemoryFallback) -> Sequence[Offer]:
    metaop, cluster = node.metaop, problem.cluster
    if not cluster.is_mixed:
        return [Listed([column_of(point) for point in node.points])]
    forwards = 1 + min(point.again for point in node.points)
    if level_of(metaop, problem.profile.sharding).is_by_pass:
        (point,) = node.points
        return [Listed([_on_all(metaop, cluster, point, forwards)])]
    return pricings(metaop, cluster, forwards, split.least_tp if metaop.name in split.split else 1)


def _on_all(metaop: MetaOpProfile, cluster: Cluster, point: Point, forwards: float) -> Column:
    """The devices of an allocation on all of them, with the time of their best cut: strategies cut a batch in
    ways of their own.
    """
    same_tp = [pricing for pricing in pricings(metaop, cluster, forwards) if pricing.tp == point.tp]
    return Column(min([point.op_s, *(pricing.shortest_s for pricing in same_tp)]), column_of(point).counts)
