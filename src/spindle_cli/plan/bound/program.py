"""The linear program behind every bound: ops over allocations, and what the prices of an optimum prove.

Sets        nodes m with L_m ops, the allocations A_m of an op of m, levels v (the end C, starts), rows r.
Data        u[a,r], what an op on allocation a uses of row r; d[v,r], what a level does; b[r].
Variables   x[m,a] >= 0, ops of m that run on a; levels >= 0.

    minimise C
    ops[m]     every op is run     sum_a x[m,a] = L_m
    row[r]                         sum_m sum_a u[a,r] x[m,a] + sum_v d[v,r] v <= b[r]

Prices y >= 0 of the rows prove a bound whatever they are (Lagrange): every schedule whose levels are all at
most 1 has

    C >= sum_m L_m min_a sum_r u[a,r] y[r] - sum_r b[r] y[r] + sum_v min(0, [v is C] + sum_r d[v,r] y[r])

so that neither the solver's tolerances nor allocations that the program was not given matter. Callers choose
the unit of seconds so that levels are at most 1; a schedule that takes longer is above 1 itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from spindle_cli.plan.bound.solver import LinearProgram

Array: TypeAlias = npt.NDArray[np.float64]

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


@dataclass(frozen=True, eq=False)
class Choice:
    """A node of the program.

    Attributes:
        num_ops: how many ops it has.
        rows: the rows that an op uses anything of.
        uses: u, for each allocation of all of these rows.
        first: allocations that the program begins with.
    """

    num_ops: float
    rows: tuple[str, ...]
    uses: Array
    first: tuple[int, ...]


@dataclass(frozen=True)
class Bounded:
    """`at_least`: what the end is at least, in the program's unit. `picked`: of each node, allocations that
    the program was solved with.
    """

    at_least: float
    picked: tuple[tuple[int, ...], ...]


def bounded(choices: Sequence[Choice], rows: Mapping[str, Row]) -> Bounded:
    """What the end is at least: as close to the program's optimum as `CLOSE`, and never above it.

    Raises:
        SolverError: the solver failed (never for rows that can be kept).
    """
    levels = dict.fromkeys((END, *(level for row in rows.values() for level in row.levels)))
    picked = [list(dict.fromkeys(choice.first)) for choice in choices]
    best = 0.0
    for _ in range(MOST_ROUNDS):
        optimum, prices = _solved(choices, rows, list(levels), picked)
        at_least, cheapest = _proven(choices, rows, list(levels), prices)
        best = max(best, at_least)
        fresh = [one not in own for own, one in zip(picked, cheapest, strict=True)]
        if best >= optimum * (1 - CLOSE) or not any(fresh):
            break
        for own, one, is_fresh in zip(picked, cheapest, fresh, strict=True):
            own += [one] * is_fresh
    return Bounded(best, tuple(map(tuple, picked)))


def _solved(
    choices: Sequence[Choice], rows: Mapping[str, Row], levels: Sequence[str], picked: Sequence[Sequence[int]]
) -> tuple[float, dict[str, float]]:
    """The optimum over the allocations that are picked, and the prices of the rows."""
    program = LinearProgram("bound")
    variables = {level: program.variable(level) for level in levels}
    program.minimise({variables[END]: 1.0})
    terms = {name: {variables[level]: by for level, by in row.levels.items()} for name, row in rows.items()}
    for number, (choice, own) in enumerate(zip(choices, picked, strict=True)):
        runs = [program.variable(f"x_{number}_{allocation}") for allocation in own]
        program.equal(f"ops_{number}", dict.fromkeys(runs, 1.0), choice.num_ops)
        for place, name in enumerate(choice.rows):
            used = choice.uses[own, place]
            terms[name] |= {x: float(use) for x, use in zip(runs, used, strict=True) if use}
    for name, row in rows.items():
        program.at_most(name, terms[name], row.at_most)
    solution = program.solve()
    return solution.objective, {name: abs(solution.duals[name]) for name in rows}


def _proven(
    choices: Sequence[Choice], rows: Mapping[str, Row], levels: Sequence[str], prices: Mapping[str, float]
) -> tuple[float, list[int]]:
    """What prices prove, and of each node the allocation that costs least by them."""
    reduced = dict.fromkeys(levels, 0.0) | {END: 1.0}
    for name, row in rows.items():
        for level, by in row.levels.items():
            reduced[level] += by * prices[name]
    terms = [-row.at_most * prices[name] for name, row in rows.items()]
    terms += [min(0.0, cost) for cost in reduced.values()]
    cheapest = []
    for choice in choices:
        costs = choice.uses @ np.array([prices[name] for name in choice.rows])
        cheapest.append(int(np.argmin(costs)))
        terms.append(choice.num_ops * float(costs[cheapest[-1]]))
    return min(1.0, sum(terms) - FLOAT_SLACK * sum(map(abs, terms))), cheapest
