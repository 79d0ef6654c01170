"""A tighter lower bound: whole numbers of devices, and nothing beside what it waits for.

The program of bound.py counts device-seconds, so that half of a 16-device allocation may fill a gap of 8.
Here time is filled with *patterns*: allocations of MetaOps, none of which waits for another, that fit side by
side on the N_k devices of each type k. Every schedule is at each moment in one of them.

Sets        patterns p; MetaOps m with L_m ops.
Data        T_m(p), seconds of one op of m on its allocation in p, for m in p.
Variables   t[p] >= 0, seconds in pattern p.

    minimise sum_p t[p]
    ops[m]      every op is run           sum_{p with m} t[p] / T_m(p) = L_m

That MetaOps run in sequence, and producers come first, takes no rows: no two MetaOps of a chain are in one
pattern, so the seconds of a chain are no more than those of all patterns.

Patterns are generated one at a time: the dual values price the seconds of each allocation, and the best
pattern of each set of MetaOps of which none waits for another is a knapsack (`knapsack.py`). While a better
one exists, the dual values scaled down by how much better it is are still a bound.

The bound is of schedules on the allocations that the problem lists. On several types these are some of all
that there are, unless it is made with all (`KnownAllocations`).

Slower than planning by far: for benchmarks and doubts, not for every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import networkx as nx

from spindle_cli.plan.bound.knapsack import Pattern, Worth, best_of_parts
from spindle_cli.plan.bound.solver import LinearProgram
from spindle_cli.plan.problem import Problem

# What the solver's tolerances may be off by.
_SLACK = 1e-6


class Sequenced(NamedTuple):
    """Patterns that take turns.

    Attributes:
        length_s: of all together.
        seconds: of each pattern.
        op_worth_s: of each node, by how much an op more would make the sequence longer.
    """

    length_s: float
    seconds: list[float]
    op_worth_s: list[float]


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
    parts = sets_by_part(problem)
    best_s = 0.0
    for _ in range(max_patterns):
        found = shortest_sequence(problem, known)
        value, pattern = best_of_parts(parts, _worth(problem, found.op_worth_s), problem.devices_of_types)
        # Dual values divided by this satisfy the constraint of every pattern.
        best_s = max(best_s, found.length_s / max(1.0, value))
        if best_s >= found.length_s * (1 - precision):
            break
        known.append(pattern)
    return best_s * (1 - _SLACK)


def shortest_sequence(problem: Problem, patterns: Sequence[Pattern]) -> Sequenced:
    """The program over these patterns, among which each node is in one at least.

    Raises:
        SolverError: the solver failed (never for a valid problem).
    """
    unit_s = problem.serial_s
    program = LinearProgram("sequence_of_patterns")
    turns = [program.variable(f"t_{number}") for number in range(len(patterns))]
    program.minimise(dict.fromkeys(turns, 1.0))
    rows: list[dict[Any, float]] = [{} for _ in problem.nodes]
    for turn, pattern in zip(turns, patterns, strict=True):
        for index, point in pattern.items():
            node = problem.nodes[index]
            rows[index][turn] = unit_s / (node.points[point].op_s * node.num_ops)
    for index, row in enumerate(rows):
        program.equal(f"ops_{index}", row, 1.0)
    solution = program.solve()
    return Sequenced(
        solution.objective * unit_s,
        [solution.values[f"t_{number}"] * unit_s for number in range(len(patterns))],
        [solution.duals[f"ops_{node.index}"] * unit_s / node.num_ops for node in problem.nodes],
    )


def patterns_of(spans: Sequence[tuple[int, int, float, float]]) -> list[Pattern]:
    """The patterns that a schedule goes through, from (node, point, start, end) of its slices."""
    times = sorted({time for _, _, start_s, end_s in spans for time in (start_s, end_s)})
    found = {
        tuple(sorted((node, point) for node, point, start_s, end_s in spans if start_s <= at < end_s))
        for at in times[:-1]
    }
    return [dict(pattern) for pattern in sorted(found) if pattern]


def sets_by_part(problem: Problem) -> list[list[list[int]]]:
    """For each part of the graph that hangs together, the largest sets of nodes of which none waits for
    another.
    """
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(node.index for node in problem.nodes)
    graph.add_edges_from((node.index, other) for node in problem.nodes for other in node.inputs)
    waits_for = ancestors(problem)
    found = []
    for part in sorted(map(sorted, nx.connected_components(graph))):
        apart: nx.Graph[int] = nx.Graph()
        apart.add_nodes_from(part)
        apart.add_edges_from(
            (i, j) for i in part for j in part if i < j and i not in waits_for[j] and j not in waits_for[i]
        )
        found.append(sorted(sorted(nodes) for nodes in nx.find_cliques(apart)))
    return found


def ancestors(problem: Problem) -> list[frozenset[int]]:
    """For each node, all that it waits for."""
    found: list[frozenset[int]] = [frozenset()] * len(problem.nodes)
    for i in problem.order:
        for j in problem.nodes[i].inputs:
            found[i] |= found[j] | {j}
    return found


def _worth(problem: Problem, op_worth_s: Sequence[float]) -> dict[int, list[Worth]]:
    """By node, what a second of each of its points in a pattern is worth; none where no second is."""
    return {
        node.index: [
            Worth(k, point.of_types, op_worth_s[node.index] / point.op_s)
            for k, point in enumerate(node.points)
            if op_worth_s[node.index] > 0
        ]
        for node in problem.nodes
    }
