"""The linear program behind every bound: ops over allocations, and what the prices of an optimum prove.

Sets        nodes m with L_m ops, the allocations A_m of an op of m, levels v (the end C, starts), rows r.
Data        u[a,r], what an op on allocation a uses of row r; d[v,r], what a level does; b[r].
Variables   x[m,a] >= 0, ops of m that run on a; levels >= 0.

    minimise C
    ops[m]     every op is run     sum_a x[m,a] = L_m
    row[r]                         sum_m sum_a u[a,r] x[m,a] + sum_v d[v,r] v <= b[r]

Prices y >= 0 of the rows prove a bound whatever they are (Lagrange): as no level of a schedule is above its
end C,

    C (1 - sum_v min(0, [v is C] + sum_r d[v,r] y[r])) >= sum_m L_m min_a sum_r u[a,r] y[r] - sum_r b[r] y[r]

so that neither the solver's tolerances nor allocations that the program was not given matter. Callers choose
a unit of seconds in which levels are around 1. Of some nodes there are too many allocations to list: each
node says which is cheapest by some prices, and the program gets these until none would lower it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from spindle_cli.plan.bound.solver import LinearProgram, Solution

Array: TypeAlias = npt.NDArray[np.float64]
Allocation = TypeVar("Allocation", bound=Hashable)

END = "C"
# Above what adding up a few hundred floats can be off by.
FLOAT_SLACK = 1e-12
# Allocations are added until the bound is this close to the program's optimum, at most so many times.
CLOSE = 1e-4
MOST_ROUNDS = 40


class Row(NamedTuple):
    """A row of the program, but for what ops use of it. `levels`: d, by level."""

    levels: Mapping[str, float]
    at_most: float = 0.0


class Choice(Protocol[Allocation]):
    """A node of the program.

    Attributes:
        num_ops: how many ops it has.
        rows: the rows that an op uses anything of.
        first: allocations that the program begins with.
    """

    @property
    def num_ops(self) -> float: ...
    @property
    def rows(self) -> tuple[str, ...]: ...
    @property
    def first(self) -> tuple[Allocation, ...]: ...

    def uses(self, allocation: Allocation) -> Array:
        """u, for each of the rows."""
        ...

    def cheapest(self, prices: Array) -> Allocation:
        """The allocation that costs least by prices of the rows."""
        ...


@dataclass(frozen=True)
class Bounded(Generic[Allocation]):
    """What a program proves, and its optimum.

    Attributes:
        at_least: what the end is at least, in the program's unit.
        optimum: the end over the allocations that it was solved with.
        ops: of each node, these allocations with how many ops run on them.
        levels: each level, by name.
        prices: of each row, by name.
    """

    at_least: float
    optimum: float
    ops: tuple[tuple[tuple[Allocation, float], ...], ...]
    levels: Mapping[str, float]
    prices: Mapping[str, float]


def bounded(choices: Sequence[Choice[Allocation]], rows: Mapping[str, Row]) -> Bounded[Allocation]:
    """What the end is at least: as close to the program's optimum as `CLOSE`, and never above it.

    Raises:
        SolverError: the solver failed (never for rows that can be kept).
    """
    picked = [list(dict.fromkeys(choice.first)) for choice in choices]
    best = 0.0
    for _ in range(MOST_ROUNDS):
        solved = _solved(choices, rows, picked)
        at_least, cheapest = proven(choices, rows, solved.prices)
        best = max(best, at_least)
        fresh = [
            allocation not in allocations for allocations, allocation in zip(picked, cheapest, strict=True)
        ]
        if best >= solved.optimum * (1 - CLOSE) or not any(fresh):
            break
        for allocations, allocation, is_fresh in zip(picked, cheapest, fresh, strict=True):
            allocations += [allocation] * is_fresh
    return Bounded(best, solved.optimum, solved.ops, solved.levels, solved.prices)


def _solved(
    choices: Sequence[Choice[Allocation]], rows: Mapping[str, Row], picked: Sequence[Sequence[Allocation]]
) -> Bounded[Allocation]:
    """Solve the program over the allocations that are picked."""
    program = LinearProgram("bound")
    levels = {level: program.variable(level) for level in _levels(rows)}
    program.minimise({levels[END]: 1.0})
    terms = {name: {levels[level]: by for level, by in row.levels.items()} for name, row in rows.items()}
    runs, last = [], {name: number for number, choice in enumerate(choices) for name in choice.rows}
    for number, (choice, allocations) in enumerate(zip(choices, picked, strict=True)):
        runs.append([program.variable(f"x_{number}_{place}") for place in range(len(allocations))])
        program.equal(f"ops_{number}", dict.fromkeys(runs[-1], 1.0), choice.num_ops)
        _add_uses(terms, choice, allocations, runs[-1])
        # Of equally good optima the solver finds one by the order of rows, and searches begin with it: what a
        # chain uses stands together.
        for name in choice.rows:
            if last[name] == number:
                program.at_most(name, terms[name], rows[name].at_most)
    return _optimum(program.solve(), picked, runs, levels, rows)


def _optimum(
    solution: Solution,
    picked: Sequence[Sequence[Allocation]],
    runs: Sequence[Sequence[Any]],
    levels: Iterable[str],
    rows: Iterable[str],
) -> Bounded[Allocation]:
    """The solution by the names and allocations of the program, which proves nothing yet. `runs`: of each
    node, how many ops run on each allocation.
    """
    return Bounded(
        0.0,
        solution.objective,
        tuple(
            tuple(zip(allocations, (solution.values[run.name] for run in of_choice), strict=True))
            for allocations, of_choice in zip(picked, runs, strict=True)
        ),
        {name: solution.values[name] for name in levels},
        {name: abs(solution.duals[name]) for name in rows},
    )


def _add_uses(
    terms: Mapping[str, dict[Any, float]],
    choice: Choice[Allocation],
    allocations: Sequence[Allocation],
    runs: Sequence[Any],
) -> None:
    """Add to rows what an op uses of them on each allocation. `runs`: how many ops run on these."""
    for run, allocation in zip(runs, allocations, strict=True):
        for name, use in zip(choice.rows, choice.uses(allocation).tolist(), strict=True):
            if use:
                terms[name][run] = use


def proven(
    choices: Sequence[Choice[Allocation]], rows: Mapping[str, Row], prices: Mapping[str, float]
) -> tuple[float, list[Allocation]]:
    """What prices prove, and of each node the allocation that costs least by them."""
    reduced = dict.fromkeys(_levels(rows), 0.0) | {END: 1.0}
    for name, row in rows.items():
        for level, by in row.levels.items():
            reduced[level] += by * prices[name]
    broken = -sum(min(0.0, cost) for cost in reduced.values())
    terms = [-row.at_most * prices[name] for name, row in rows.items()]
    cheapest = []
    for choice in choices:
        row_prices = np.array([prices[name] for name in choice.rows])
        cheapest.append(choice.cheapest(row_prices))
        terms.append(choice.num_ops * float(choice.uses(cheapest[-1]) @ row_prices))
    return (sum(terms) - FLOAT_SLACK * sum(map(abs, terms))) / (1 + broken), cheapest


def _levels(rows: Mapping[str, Row]) -> dict[str, None]:
    return dict.fromkeys((END, *(level for row in rows.values() for level in row.levels)))


def chain_rows(consumers: Sequence[Sequence[int]]) -> list[dict[str, Row]]:
    """Return for each node the rows that say that it ends before others start, or the end.

    Args:
        consumers: of each node, those that start behind it.
    """
    rows = []
    for number, followers in enumerate(consumers):
        begin = {f"start_{number}": 1.0}
        edges = {
            f"edge_{number}_{follower}": Row(begin | {f"start_{follower}": -1.0}) for follower in followers
        }
        rows.append(edges or {f"end_{number}": Row(begin | {END: -1.0})})
    return rows


def device_rows(counts: Sequence[float]) -> dict[str, Row]:
    """The rows that say that no type of device, of which there are so many, has more to do than until the
    end.
    """
    return {f"devices_{kind}": Row({END: -float(count)}) for kind, count in enumerate(counts)}
