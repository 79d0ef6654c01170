"""A tighter lower bound: whole numbers of devices, and nothing beside what it waits for.

The program of bound.py counts device-seconds, so that half of a 16-device allocation may fill a gap of 8.
Here time is filled with *patterns*: allocations of MetaOps, none of which waits for another, that fit side by
side on the N_k devices of each type k. Every schedule is at each moment in one of them.

Sets        patterns p; MetaOps m with L_m ops; E, the edges.
Data        T_m(p), seconds of one op of m on its allocation in p, for m in p.
Variables   t[p] >= 0, seconds in pattern p; s[m] >= 0, start of m; C, end of the iteration.

    minimise C
    ops[m]      every op is run           sum_{p with m} t[p] / T_m(p) = L_m
    end[m]      m runs in sequence        s[m] + sum_{p with m} t[p] <= C        (m without consumers)
    edge[i,j]   producers come first      s[i] + sum_{p with i} t[p] <= s[j]     for (i,j) in E
    time        patterns take turns       sum_p t[p] <= C

Patterns are generated one at a time. The dual values price the seconds of each allocation, and the best
pattern is a knapsack over the devices with conflicts between MetaOps that wait for each other (a small
integer program). While a better one exists, the dual values scaled down by how much better it is, or may be,
are still a bound; so knapsacks are solved roughly as long as that finds better ones.

The bound is of schedules on the allocations that the problem lists. On several types these are some of all
that there are, unless it is made with all (`KnownAllocations`).

Slower than planning by far: for benchmarks and doubts, not for every plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pulp

from spindle_cli.plan.bound.solver import LinearProgram, Solution, solver
from spindle_cli.plan.problem import Problem

Pattern = dict[int, int]  # node -> index of its point

# How far from the best pattern one may be that is looked for, as a share of its worth: first, and at last.
ROUGHLY, EXACTLY = 0.05, 0.0005
# What is worth more by less than this is no better.
_HARDLY = 1e-6


def pattern_bound_s(
    problem: Problem, patterns: Sequence[Pattern] = (), max_patterns: int = 300, precision: float = 1e-3
) -> float:
    """No schedule ends earlier.

    Args:
        patterns: some to start with, e.g. those of a good schedule.
        max_patterns: stop after so many more.
        precision: stop when the bound is known up to this share.

    Raises:
        SolverError: the solver failed.
    """
    known = [{node.index: len(node.points) - 1} for node in problem.nodes] + list(patterns)
    ancestors = _ancestors(problem)
    best, off = 0.0, ROUGHLY
    for _ in range(max_patterns):
        solution = _solve(problem, known)
        worth = _worth(problem, solution)
        price = abs(solution.duals["time"])
        value, pattern = _best_pattern(problem, worth, ancestors, off)
        # Dual values divided by this satisfy the constraint of every pattern.
        best = max(best, solution.objective / (1 + max(0.0, value * (1 + off) - price)))
        if best >= solution.objective * (1 - precision):
            break
        if value > price + _HARDLY:
            known.append(pattern)
        elif off > EXACTLY:
            off = max(off / 4, EXACTLY)
        else:
            break
    return best * problem.serial_s * (1 - 1e-6)


def patterns_of(spans: Sequence[tuple[int, int, float, float]]) -> list[Pattern]:
    """The patterns that a schedule goes through, from (node, point, start, end) of its slices."""
    times = sorted({time for _, _, start_s, end_s in spans for time in (start_s, end_s)})
    found = {
        tuple(sorted((node, point) for node, point, start_s, end_s in spans if start_s <= at < end_s))
        for at in times[:-1]
    }
    return [dict(pattern) for pattern in sorted(found) if pattern]


def _solve(problem: Problem, patterns: Sequence[Pattern]) -> Solution:
    """The program over these patterns; seconds in `serial_s`, ops in L_m."""
    unit_s = problem.serial_s
    program = LinearProgram("patterns")
    end = program.variable("C")
    starts = [program.variable(f"s_{node.index}") for node in problem.nodes]
    seconds = [program.variable(f"t_{number}") for number in range(len(patterns))]
    program.minimise({end: 1.0})
    for node in problem.nodes:
        i = node.index
        own = {t: pattern[i] for t, pattern in zip(seconds, patterns, strict=True) if i in pattern}
        program.equal(
            f"ops_{i}", {t: unit_s / (node.points[k].op_s * node.num_ops) for t, k in own.items()}, 1.0
        )
        finish = dict.fromkeys(own, 1.0) | {starts[i]: 1.0}
        if not node.consumers:
            program.at_most(f"end_{i}", finish | {end: -1.0}, 0.0)
        for j in node.consumers:
            program.at_most(f"edge_{i}_{j}", finish | {starts[j]: -1.0}, 0.0)
    program.at_most("time", dict.fromkeys(seconds, 1.0) | {end: -1.0}, 0.0)
    return program.solve()


def _worth(problem: Problem, solution: Solution) -> dict[tuple[int, int], float]:
    """What a second of each (node, point) in a pattern is worth; only those that are worth something."""
    duals, unit_s = solution.duals, problem.serial_s
    worth: dict[tuple[int, int], float] = {}
    for node in problem.nodes:
        i = node.index
        rows = [f"edge_{i}_{j}" for j in node.consumers] or [f"end_{i}"]
        waiting = sum(abs(duals[row]) for row in rows)
        for k, point in enumerate(node.points):
            value = duals[f"ops_{i}"] * unit_s / (point.op_s * node.num_ops) - waiting
            if value > 0:
                worth[i, k] = value
    return worth


def _best_pattern(
    problem: Problem,
    worth: Mapping[tuple[int, int], float],
    ancestors: Sequence[frozenset[int]],
    off: float,
) -> tuple[float, Pattern]:
    """A pattern that is worth most, but for a share `off`, and what.

    y[m,k] = 1 if m runs on its point k:  maximise sum worth y;  one point each;  sum devices y <= N of each
    type;  y[m,.] + y[a,.] <= 1 where m waits for a.
    """
    if not worth:
        return 0.0, {}
    program = pulp.LpProblem("pattern", pulp.LpMaximize)
    chosen = {(i, k): program.add_variable(f"y_{i}_{k}", 0, 1, pulp.LpBinary) for i, k in worth}
    program.setObjective(pulp.LpAffineExpression({chosen[key]: value for key, value in worth.items()}))
    of_node: dict[int, dict[pulp.LpVariable, float]] = {}
    for (i, _), variable in chosen.items():
        of_node.setdefault(i, {})[variable] = 1.0
    for kind, most in enumerate(problem.devices_of_types):
        devices = {chosen[i, k]: problem.nodes[i].points[k].of_types[kind] for i, k in worth}
        program.addConstraint(pulp.LpAffineExpression(devices) <= most)
    for i, own in of_node.items():
        program.addConstraint(pulp.LpAffineExpression(own) <= 1)
        for j in ancestors[i]:
            if j in of_node:
                program.addConstraint(pulp.LpAffineExpression(own | of_node[j]) <= 1)
    program.solve(solver(relative_gap=off))
    assert program.status == pulp.LpStatusOptimal, "a knapsack always has a solution"
    pattern = {i: k for (i, k), variable in chosen.items() if variable.varValue > 0.5}
    return float(pulp.value(program.objective)) + 1e-9, pattern


def _ancestors(problem: Problem) -> list[frozenset[int]]:
    """For each node, all that it waits for."""
    found: list[frozenset[int]] = [frozenset()] * len(problem.nodes)
    for i in problem.order:
        for j in problem.nodes[i].inputs:
            found[i] |= found[j] | {j}
    return found
