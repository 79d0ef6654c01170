"""The one place where a linear program is solved: PuLP's interface, HiGHS behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pulp

# Of what the solver returned, how far a constraint may be off. Programs are scaled so that their values are
# around 1.
TOLERANCE = 1e-6


class SolverError(AssertionError):
    """The solver failed on a program that has a solution: our own bug or the solver's, never the user's."""


@dataclass(frozen=True)
class Solution:
    """An optimum: the objective, and by name the value of each variable and the dual of each constraint."""

    objective: float
    values: Mapping[str, float]
    duals: Mapping[str, float]


def solver(relative_gap: float | None = None) -> Any:
    """The solver, on one thread so that it does the same every time. `relative_gap`: of integer programs."""
    return pulp.HiGHS(msg=False, threads=1, gapRel=relative_gap)


class LinearProgram:
    """A linear program to minimise, built row by row from {variable: coefficient}.

    Rows go in as whole expressions: adding terms one at a time is what takes long in PuLP.
    """

    def __init__(self, name: str) -> None:
        self._problem = pulp.LpProblem(name, pulp.LpMinimize)

    def variable(self, name: str, low: float = 0.0, high: float | None = None) -> Any:
        """A new continuous variable."""
        return self._problem.add_variable(name, low, high)

    def minimise(self, terms: dict[Any, float]) -> None:
        """Set the objective."""
        self._problem.setObjective(pulp.LpAffineExpression(terms))

    def equal(self, name: str, terms: dict[Any, float], value: float) -> None:
        """Constraint `name`: sum of terms = value."""
        self._add(name, terms, pulp.LpConstraintEQ, value)

    def at_most(self, name: str, terms: dict[Any, float], value: float) -> None:
        """Constraint `name`: sum of terms <= value."""
        self._add(name, terms, pulp.LpConstraintLE, value)

    def at_least(self, name: str, terms: dict[Any, float], value: float) -> None:
        """Constraint `name`: sum of terms >= value."""
        self._add(name, terms, pulp.LpConstraintGE, value)

    def _add(self, name: str, terms: dict[Any, float], sense: int, value: float) -> None:
        self._problem.addConstraint(
            pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, name=name, rhs=value)
        )

    def solve(self) -> Solution:
        """Solve to proven optimality and check the solution against every constraint.

        Raises:
            SolverError: not optimal, or the solution breaks a constraint (PuLP has reported both as
                'Optimal').
        """
        problem = self._problem
        problem.solve(solver())
        if problem.status != pulp.LpStatusOptimal or problem.sol_status != pulp.LpSolutionOptimal:
            raise SolverError(f"{problem.name}: the solver ended with {pulp.LpStatus[problem.status]!r}")
        values = {variable.name: variable.varValue for variable in problem.variables()}
        duals: dict[str, float] = {}
        for name, row in problem._constraints.items():
            left = sum(coefficient * variable.varValue for variable, coefficient in row.items())
            excess = left + row.constant
            scale = 1.0 + abs(row.constant)
            if (row.sense != pulp.LpConstraintGE and excess > TOLERANCE * scale) or (
                row.sense != pulp.LpConstraintLE and excess < -TOLERANCE * scale
            ):
                raise SolverError(f"{problem.name}: the solution breaks {name} by {abs(excess):.3g}")
            duals[name] = row.pi
        return Solution(pulp.value(problem.objective), values, duals)
