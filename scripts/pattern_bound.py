"""A tighter lower bound: whole numbers of devices, and nothing beside what it waits for.

The program of `plan/bound/bound.py` counts device-seconds, so that half of a 16-device allocation may fill a
gap of 8. Here time is filled with *patterns*: allocations of MetaOps, none of which waits for another, that
fit side by side on the N_k devices of each type k. Every schedule is at each moment in one of them.

Sets        patterns p; MetaOps m with L_m ops.
Data        T_m(p), seconds of one op of m on its allocation in p, for m in p.
Variables   t[p] >= 0, seconds in pattern p.

    minimise sum_p t[p]
    ops[m]      every op is run           sum_{p with m} t[p] / T_m(p) = L_m

That MetaOps run in sequence, and producers come first, takes no rows: no two MetaOps of a chain are in one
pattern, so the seconds of a chain are no more than those of all patterns.

Patterns are generated one at a time: the dual values price the seconds of each allocation, and the best
pattern of each set of MetaOps of which none waits for another is a knapsack with a capacity for each type of
device, solved by dynamic programming over the devices that are free. While a better one exists, the dual
values scaled down by how much better it is are still a bound.

The bound is of schedules on the allocations that the problem lists. On several types these are some of all
that there are; `with_every_number` lists all.

Slower than planning by far: for benchmarks and doubts, not for every plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import numpy.typing as npt

from spindle_cli.plan.bound.solver import LinearProgram
from spindle_cli.plan.cutting.allocations import cut_into, degrees_of, groups_of_degrees, unbeaten
from spindle_cli.plan.cutting.shares import ShareTimes, share_times
from spindle_cli.plan.problem import Node, Point, Problem

Pattern = dict[int, int]  # node -> index of its point
# What the solver's tolerances may be off by.
_SLACK = 1e-6
# Of patterns whose worth differs by less, any is the best.
_HARDLY = 1e-12

_Values = npt.NDArray[np.float64]
_Choice = npt.NDArray[np.int32]


def pattern_bound_s(problem: Problem, max_patterns: int = 300, precision: float = 1e-3) -> float:
    """No schedule ends earlier.

    Args:
        max_patterns: stop after so many.
        precision: stop when the bound is known up to this share.

    Raises:
        SolverError: the solver failed.
    """
    known = [{node.index: len(node.points) - 1} for node in problem.nodes]
    parts = sets_by_part(problem)
    best_s = 0.0
    for _ in range(max_patterns):
        length_s, op_worth_s = _shortest_sequence(problem, known)
        value, pattern = best_of_parts(parts, _worth(problem, op_worth_s), problem.devices_of_types)
        # Dual values divided by this satisfy the constraint of every pattern.
        best_s = max(best_s, length_s / max(1.0, value))
        if best_s >= length_s * (1 - precision):
            break
        known.append(pattern)
    return best_s * (1 - _SLACK)


def _shortest_sequence(problem: Problem, patterns: Sequence[Pattern]) -> tuple[float, list[float]]:
    """The length of the program's optimum over these patterns, among which each node is in one at least; and
    of each node by how much an op more would make it longer.

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
    return solution.objective * unit_s, [
        solution.duals[f"ops_{node.index}"] * unit_s / node.num_ops for node in problem.nodes
    ]


def sets_by_part(problem: Problem) -> list[list[list[int]]]:
    """For each part of the graph that hangs together, the largest sets of nodes of which none waits for
    another.
    """
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(node.index for node in problem.nodes)
    graph.add_edges_from((node.index, other) for node in problem.nodes for other in node.inputs)
    waits_for = _ancestors(problem)
    found = []
    for part in sorted(map(sorted, nx.connected_components(graph))):
        apart: nx.Graph[int] = nx.Graph()
        apart.add_nodes_from(part)
        apart.add_edges_from(
            (i, j) for i in part for j in part if i < j and i not in waits_for[j] and j not in waits_for[i]
        )
        found.append(sorted(sorted(nodes) for nodes in nx.find_cliques(apart)))
    return found


def _ancestors(problem: Problem) -> list[frozenset[int]]:
    """For each node, all that it waits for."""
    found: list[frozenset[int]] = [frozenset()] * len(problem.nodes)
    for i in problem.order:
        for j in problem.nodes[i].inputs:
            found[i] |= found[j] | {j}
    return found


class Worth(NamedTuple):
    """What a second of an allocation is worth.

    Attributes:
        point: of the node's.
        devices: of each type that it takes.
        value: in seconds of the schedule; above 0.
    """

    point: int
    devices: tuple[int, ...]
    value: float


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


class _Part(NamedTuple):
    """What the best pattern has of one part: by what is free, which of its sets, and of each set the choices
    of its nodes.
    """

    chosen: _Choice
    sets: list[list[tuple[int, _Choice]]]


def best_of_parts(
    parts: Sequence[Sequence[Sequence[int]]], worth: Mapping[int, Sequence[Worth]], room: Sequence[int]
) -> tuple[float, Pattern]:
    """What a second of the best pattern is worth, and the pattern: nodes are in parts, from each of which a
    pattern has nodes of one set.

    Args:
        parts: of each, its sets.
        worth: by node.
        room: devices of each type.
    """
    values = np.zeros(tuple(count + 1 for count in room))  # by what is free, of the parts so far
    done: list[_Part] = []
    for sets in parts:
        best, chosen, choices = values, np.full(values.shape, -1, np.int32), []
        for number, nodes in enumerate(sets):
            own, choice = _with_nodes(values, nodes, worth)
            is_better = own > best + _HARDLY
            best = np.where(is_better, own, best)
            chosen[is_better] = number
            choices.append(choice)
        values = best
        done.append(_Part(chosen, choices))
    free, pattern = tuple(room), Pattern()
    for part in reversed(done):
        if part.chosen[free] < 0:
            continue
        for node, choice in reversed(part.sets[part.chosen[free]]):
            if choice[free] >= 0:
                own_worth = worth[node][choice[free]]
                pattern[node] = own_worth.point
                free = tuple(left - taken for left, taken in zip(free, own_worth.devices, strict=True))
    return float(values[tuple(room)]), pattern


def _with_nodes(
    values: _Values, nodes: Sequence[int], worth: Mapping[int, Sequence[Worth]]
) -> tuple[_Values, list[tuple[int, _Choice]]]:
    """The best values with these nodes as well, and of each node its choice, by what is free."""
    shape = values.shape
    choices: list[tuple[int, _Choice]] = []
    for node in nodes:
        with_node, choice = values.copy(), np.full(shape, -1, np.int32)
        for number, own in enumerate(worth[node]):
            if any(taken >= size for taken, size in zip(own.devices, shape, strict=True)):
                continue
            each = zip(shape, own.devices, strict=True)
            with_own = values[tuple(slice(0, size - taken) for size, taken in each)] + own.value
            behind = tuple(slice(taken, None) for taken in own.devices)
            is_better = with_own > with_node[behind]
            np.copyto(with_node[behind], with_own, where=is_better)
            choice[behind][is_better] = number
        values = with_node
        choices.append((node, choice))
    return values, choices


def with_every_number(problem: Problem) -> Problem:
    """A problem on several types, in which nothing is given up for memory, with allocations of every number
    of devices of each type.
    """

    def points(node: Node) -> tuple[Point, ...]:
        times = share_times(node.metaop, problem.cluster, degrees=degrees_of(node.metaop, problem.cluster))
        return _of_every_number(times, groups_of_degrees(times, problem.cluster))

    return replace(problem, nodes=tuple(replace(node, points=points(node)) for node in problem.nodes))


@lru_cache(1024)
def _of_every_number(
    of_degrees: tuple[ShareTimes, ...], groups: tuple[tuple[int, ...], ...]
) -> tuple[Point, ...]:
    """Of so many groups of devices of each type for each degree of tensor parallelism."""
    return unbeaten(
        point
        for times, room in zip(of_degrees, groups, strict=True)
        for point in cut_into(times, product(*(range(most + 1) for most in room)))
    )
